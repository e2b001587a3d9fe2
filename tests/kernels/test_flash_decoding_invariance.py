"""A batch-invariant plan gives a token the same output bits whoever else is in the batch.

The interpreter shows that no order of addition depends on the batch; that matrix units add the rows
of a tile independently of each other is theirs to keep.
"""

from __future__ import annotations

import pytest
import torch
from kernel_data import random_tensors
from rows_apart import rows_apart

from kvferry.kernels.chips import INTERPRETER
from kvferry.kernels.flash_decoding import wrapper
from kvferry.kernels.flash_decoding.configs import Config
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import KvLayer, quantised

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, HEAD_DIM = 8, 60, 320, 64
TILE, SPLIT = 16, 32
Token = tuple[int, int]
"""Sequence and position."""


class Cache:
    """Sequences over one cache, whose tokens' queries are the same wherever they are decoded."""

    def __init__(self, seed: int, dtype: torch.dtype, window: int | None) -> None:
        random = random_tensors(seed)
        self.window = window
        shape = (NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_DIM)
        (k, k_scale), (v, v_scale) = (quantised(random(*shape), dtype) for _ in range(2))
        self.kv = KvLayer(k, v, k_scale, v_scale)
        self.tables = torch.stack(
            [torch.randperm(NUM_BLOCKS)[: MAX_LEN // BLOCK_SIZE] for _ in range(3)]
        ).to(torch.int32)
        self.queries = random(3, MAX_LEN, 2, HEAD_DIM, dtype=torch.bfloat16)

    def decode(self, drafts: list[list[Token]], max_query_len: int) -> dict[Token, torch.Tensor]:
        """Each draft: tokens of one sequence that follow one another."""
        splits = SplitPlan.for_bucket(
            len(drafts),
            max_query_len,
            2,
            self.kv,
            MAX_LEN,
            INTERPRETER,
            window=self.window,
            invariant_split=SPLIT,
            config=Config(tile=TILE),
        )
        tokens = [token for draft in drafts for token in draft]
        context_lens = torch.tensor([draft[0][1] for draft in drafts], dtype=torch.int32)
        ends = torch.tensor([0, *map(len, drafts)]).cumsum(0).to(torch.int32)
        wrapper.plan_splits(context_lens, ends, splits)
        out = wrapper.flash_decoding(
            torch.stack([self.queries[token] for token in tokens]),
            self.kv,
            self.tables[[draft[0][0] for draft in drafts]],
            context_lens,
            ends,
            splits,
            scale=0.5,
            window=self.window,
        )
        return dict(zip(tokens, out, strict=True))


@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.bfloat16, None), (torch.int8, 4 * SPLIT + 1), (torch.float8_e4m3fn, 3 * SPLIT)],
)
def test_equal_bits_alone_and_in_any_batch(
    seeded: int, dtype: torch.dtype, window: int | None
) -> None:
    """The draft crosses the end of a split, and with it the window's first key crosses one."""
    cache = Cache(seeded, dtype, window)
    draft = [(0, 5 * SPLIT - 2 + i) for i in range(4)]
    last, other = (1, 150), [(2, 77), (2, 78)]
    with rows_apart():
        together = cache.decode([other, draft, [last]], 4)
        for token in (draft[0], draft[3]):
            assert torch.equal(cache.decode([[token]], 1)[token], together[token])
        rows = cache.decode([[last], [(2, 78)], [draft[2]]], 1)
    assert all(torch.equal(rows[token], together[token]) for token in rows)
