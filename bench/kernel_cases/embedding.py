"""Embedding of a decode and of a prefill step, from a whole table and from a shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from weakref import WeakValueDictionary

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.embedding import reference
from kvferry.kernels.embedding.wrapper import embedding_launch

VOCAB, SIZE = 128256, 4096
"""Of Llama-3-8B."""

_TABLES: WeakValueDictionary[tuple[int, torch.device], torch.Tensor] = WeakValueDictionary()
"""For as long as a call uses them: a round of small calls has many inputs of its own, and as many
tables of 1 GB would fill any device. Each call reads other rows.
"""


def cases() -> Iterator[Case]:
    """Tokens, ranks that share the table."""
    for num_tokens, num_ranks in ((64, 1), (8192, 1), (8192, 4)):
        shard = "" if num_ranks == 1 else f", a quarter of {VOCAB} rows"
        # A rank reads the rows of its share of the tokens and writes all.
        rows = num_tokens // num_ranks + num_tokens
        yield Case(
            kernel="embedding",
            name=f"{num_tokens} x {SIZE} bf16{shard}",
            make=partial(_work, num_tokens, num_ranks),
            nbytes=2 * SIZE * rows + 8 * num_tokens,
            flops=0,
            tolerance=0.0,
            limit=Limit.COPY,
            goal=0.85 if (num_tokens, num_ranks) == (8192, 1) else None,
            in_ci=(num_tokens, num_ranks) == (8192, 1),
        )


def _work(num_tokens: int, num_ranks: int, device: torch.device, chip: Chip) -> Work:
    num_rows = VOCAB // num_ranks
    start = VOCAB - num_rows
    weight = _table(num_rows, device)
    ids = torch.randint(VOCAB, (num_tokens,), device=device)
    out = torch.empty(num_tokens, SIZE, device=device, dtype=torch.bfloat16)
    return Work(
        launches=[embedding_launch(ids, weight, start, out, chip)],
        outputs=[out],
        expected=lambda: [reference.embedding(ids, weight, start)],
        peers=(
            {"torch embedding": partial(torch.nn.functional.embedding, ids, weight)}
            if num_ranks == 1
            else {}
        ),
    )


def _table(num_rows: int, device: torch.device) -> torch.Tensor:
    found = _TABLES.get((num_rows, device))
    if found is None:
        found = torch.randn(num_rows, SIZE, device=device, dtype=torch.bfloat16)
        _TABLES[num_rows, device] = found
    return found
