"""Random logits and sampling parameters, and what may explain a token that differs."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch

from kvferry.engine.plan import SamplingRows
from kvferry.kernels.sampling import reference
from kvferry.kernels.sampling.philox import neg_log_exponential, uniform_words
from kvferry.kernels.sampling.tensors import RaggedIds, SamplingTensors

NEAR = 1e-5
"""Relative: scores that are closer, and mass that is closer to top-p's limit, may be told apart
differently by float32 and float64.
"""


def random_logits(generator: torch.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    """Rows of all kinds: flat, peaked, of few values, constant, wide, zeros of both signs."""
    x = torch.randn(rows, vocab_size, generator=generator)
    kinds = (
        x,
        x * 4,
        (x * 2).round() / 2,
        torch.full_like(x, 2.5),
        x * 1000,
        torch.where(x > 0, 0.0, -0.0),
        torch.where(x > 1.5, 12.0 + x, x),
    )
    first = int(torch.randint(len(kinds), (1,), generator=generator))
    return torch.stack([kinds[(first + row) % len(kinds)][row] for row in range(rows)])


def random_params(
    generator: torch.Generator,
    rows: int,
    *,
    filtered: bool = True,
    temperature: float | None = None,
) -> SamplingTensors:
    """Every combination of filters, greedy rows among them unless a temperature is given."""

    def choice(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        picked = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[picked]

    def integers(low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (rows,), generator=generator, dtype=dtype)

    warm = [0.0, 1e-3, 0.3, 0.7, 1.0, 1.5, 100.0] if temperature is None else [temperature]
    on = 1 if filtered else 0
    return SamplingTensors(
        temperature=choice(warm),
        top_k=choice([0, 0, *[1, 2, 5, 50, 256, 10**6] * on], torch.int32),
        top_p=choice([1.0, 1.0, *[0.95, 0.5, 0.05, 1e-6] * on]),
        min_p=choice([0.0, 0.0, *[0.01, 0.3, 1.0] * on]),
        seed=integers(-(2**63), 2**63 - 1, torch.int64),
        sample_index=integers(0, 2**31 - 1, torch.int32),
        position=integers(0, 2**33, torch.int64),
        filtered=filtered,
    )


def rows_of(params: SamplingTensors, index: torch.Tensor) -> SamplingTensors:
    """The parameters of some rows."""
    tensors = {f.name: getattr(params, f.name) for f in fields(params) if f.name != "filtered"}
    return replace(params, **{name: tensor[index] for name, tensor in tensors.items()})


def engine_rows(params: SamplingTensors) -> SamplingRows:
    """The same parameters as the engine's plan has them."""
    return SamplingRows(
        temperature=params.temperature.numpy(),
        top_k=params.top_k.numpy(),
        top_p=params.top_p.numpy(),
        min_p=params.min_p.numpy(),
        seed=params.seed.numpy().view(np.uint64),
        sample_index=params.sample_index.numpy(),
        position=params.position.numpy(),
    )


def ragged(
    generator: torch.Generator, rows: int, vocab_size: int, most: int, *, values: bool = False
) -> RaggedIds:
    """0 to ``most`` ids per row, each once, some outside the vocabulary."""
    sizes = torch.randint(0, most + 1, (rows,), generator=generator)
    ids = [torch.randperm(vocab_size + 6, generator=generator)[:n] - 3 for n in sizes.tolist()]
    offsets = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    count = int(offsets[-1])
    return RaggedIds(
        ids=torch.cat(ids).int(),
        offsets=offsets,
        values=torch.randn(count, generator=generator) * 5 if values else None,
    )


def unexplained(
    logits: torch.Tensor, params: SamplingTensors, got: torch.Tensor, expected: torch.Tensor
) -> list[str]:
    """Rows whose tokens differ although neither a near tie nor the edge of a filter excuses it."""
    vocab_size, wrong = logits.shape[1], []
    for row in (got != expected).nonzero().flatten().tolist():
        index = torch.tensor([row])
        param, x = rows_of(params, index), logits[index].double()
        pair = torch.stack([got[row], expected[row]])
        words = uniform_words(
            param.seed, param.sample_index.long(), param.position, pair.unsqueeze(0)
        )
        scale = float(param.temperature)
        scores = x[0, pair] / scale + neg_log_exponential(words)[0] if scale else x[0, pair]
        if abs(scores[0] - scores[1]) <= NEAR * scores.abs().max().clamp(min=1.0):
            continue
        moved = [
            replace(param, top_p=param.top_p * (1 + s), min_p=(param.min_p * (1 + t)).clamp(max=1))
            for s in (-NEAR, 0, NEAR)
            for t in (-NEAR, 0, NEAR)
        ]
        if not any(reference.sample(x, m, vocab_size).token_ids[0] == got[row] for m in moved):
            wrong.append(f"row {row}: {pair.tolist()}, scores {scores.tolist()}, {param}")
    return wrong
