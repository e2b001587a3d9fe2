"""Paged attention against dense attention over each sequence's own keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from step_plans import scattered_tables, step_plan
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.cache.paged import PagedKV
from kvferry.engine.attention import MAX_BUCKET_TOKENS, QUERY_BLOCK, PagedAttention
from kvferry.engine.step_tensors import SHORT_QUERY_LEN, StepTensors
from kvferry.models.decoder import Heads

torch.set_num_threads(1)

HEAD_DIM = 8
LAYERS = 2


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [T, Hq, D] are the last T positions of k, v [L, Hkv, D]; all in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->htl", q, k) / q.shape[-1] ** 0.5
    length, context = len(k), len(k) - len(q)
    future = torch.arange(length) > torch.arange(context, length)[:, None]
    return torch.einsum("htl,lhd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def unrotated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
    """Heads whose rotation is by no angle."""
    zero = q.new_zeros(len(q), HEAD_DIM // 2)
    return Heads(q, k, v, zero.cos(), zero.sin())


class Step:
    """One step of random sequences on a scattered cache; what no sequence owns is NaN."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        *,
        heads: tuple[int, int] = (6, 2),
        block_size: int = 16,
        dtype: torch.dtype = torch.float64,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        # In the order that a step has, in which rows of tensors and sequences of the plan agree.
        order = sorted(range(len(query_lens)), key=lambda i: query_lens[i] > SHORT_QUERY_LEN)
        query_lens, context_lens = ([lens[i] for i in order] for lens in (query_lens, context_lens))
        generator = torch.Generator().manual_seed(sum(query_lens) + sum(context_lens))
        lengths = np.add(query_lens, context_lens).tolist()
        self.tables, count = scattered_tables(lengths, block_size, np.random.default_rng(1))
        plan = step_plan([[0] * n for n in query_lens], context_lens, self.tables)
        self.kv = PagedKV.allocate(
            num_layers=LAYERS,
            num_kv_heads=heads[1],
            head_dim=HEAD_DIM,
            block_size=block_size,
            num_blocks=count,
            dtype=kv_dtype or dtype,
        )
        self.kv.tensor.fill_(torch.nan)
        self.tensors = StepTensors.build(plan, block_size, "cpu")
        self.query_lens, self.context_lens = query_lens, context_lens

        def draw(count: int, heads: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(count, heads, HEAD_DIM, generator=generator).to(dtype)

        self.q = draw(sum(query_lens), heads[0])
        self.k, self.v = (draw(sum(query_lens), heads[1]) for _ in range(2))
        for seq, context in enumerate(context_lens):
            for part in range(2):
                context_kv = draw(context, heads[1], self.kv.dtype)
                self.kv.slots[1, part, self.slots(seq)[:context]] = context_kv

    def slots(self, seq: int) -> list[int]:
        size, table = self.kv.block_size, self.tables[seq]
        length = self.query_lens[seq] + self.context_lens[seq]
        return [table[t // size] * size + t % size for t in range(length)]

    def attend(self) -> torch.Tensor:
        return PagedAttention(self.kv, self.tensors)(1, unrotated(self.q, self.k, self.v))

    def expected(self) -> torch.Tensor:
        """From the cache as it is after the step's own K and V were written."""
        parts = []
        for seq, query in enumerate(self.q.split(self.query_lens)):
            k, v = self.kv.slots[1][:, self.slots(seq)]
            parts.append(dense(query, k, v))
        return torch.cat(parts)


CASES = [
    ([1, 1, 1], [0, 5, 40]),
    ([1] * 9, [3, 100, 99, 98, 7, 50, 100, 0, 31]),
    ([5], [0]),
    ([QUERY_BLOCK], [0]),
    ([2 * QUERY_BLOCK + 3], [0]),
    ([QUERY_BLOCK + 1, 2], [37, 300]),
    ([1, 40, 1, 17, 1], [33, 16, 0, 0, 15]),
]


@pytest.mark.parametrize(("query_lens", "context_lens"), CASES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("block_size", [3, 16])
def test_exact_in_float64(
    query_lens: list[int], context_lens: list[int], heads: tuple[int, int], block_size: int
) -> None:
    step = Step(query_lens, context_lens, heads=heads, block_size=block_size)
    got = step.attend()
    torch.testing.assert_close(got, step.expected(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("query_lens", "context_lens"), CASES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 3e-2),
        (torch.float32, torch.bfloat16, 1e-5),
    ],
)
def test_other_dtypes(
    query_lens: list[int],
    context_lens: list[int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    tolerance: float,
) -> None:
    """A narrower cache rounds the step's own K and V too, so that chunking cannot be told apart."""
    step = Step(query_lens, context_lens, dtype=dtype, kv_dtype=kv_dtype)
    got = step.attend()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), step.expected(), rtol=0, atol=tolerance)


def test_only_the_steps_own_slots_are_written() -> None:
    step = Step([1, 20], [30, 5])
    before = step.kv.tensor.clone()
    step.attend()
    written = step.tensors.slots
    slots = step.kv.slots
    assert torch.equal(slots[1, 0, written], step.k)
    assert torch.equal(slots[1, 1, written], step.v)
    before.flatten(2, 3)[1, :, written] = slots[1, :, written]
    torch.testing.assert_close(step.kv.tensor, before, rtol=0, atol=0, equal_nan=True)


def test_a_poisoned_sequence_spares_its_neighbours() -> None:
    step = Step([1, 1, 1, 4], [9, 50, 45, 7])
    step.kv.slots[1, :, step.slots(1)[3]] = torch.nan
    got = step.attend()
    assert got[1].isnan().all()
    assert torch.isfinite(got[[0, 2, 3, 4, 5, 6]]).all()


class LargestResult(TorchDispatchMode):
    """Records the sizes of new results, in elements, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(arg) for arg in args}
        for part in result if isinstance(result, list | tuple) else (result,):
            if isinstance(part, torch.Tensor) and id(part) not in inputs and not func.is_view:
                name = str(func)
                self.sizes[name] = max(self.sizes.get(name, 0), part.numel())
        return result


@pytest.mark.parametrize("context", [0, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_a_long_prompt_are_never_whole(context: int, dtype: torch.dtype) -> None:
    length = 4096
    step = Step([length], [context], heads=(6, 2), dtype=dtype)
    with LargestResult() as largest:
        step.attend()
    keys = length + context
    # The operation itself works in tiles; its other form would show the scores it makes.
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in largest.sizes
    # Inputs and outputs are of this order; the scores of one head alone would be 16.8 million.
    bound = max(length * 6 * HEAD_DIM, keys * 2 * HEAD_DIM, QUERY_BLOCK * keys)
    assert max(largest.sizes.values()) <= bound
    assert bound * 20 < length * keys


def test_keys_and_values_are_not_repeated_for_decode() -> None:
    rows, context = 16, 255
    step = Step([1] * rows, [context] * rows, heads=(8, 1))
    with LargestResult() as largest:
        step.attend()
    assert max(largest.sizes.values()) <= 2 * rows * (context + 1) * HEAD_DIM


def test_gathered_keys_are_bounded() -> None:
    rows, context = 40, MAX_BUCKET_TOKENS // 16
    step = Step([1] * rows, [context] * rows, heads=(1, 1), dtype=torch.float32)
    with LargestResult() as largest:
        got = step.attend()
    assert largest.sizes["aten.new_empty.default"] <= 2 * MAX_BUCKET_TOKENS * HEAD_DIM
    torch.testing.assert_close(got.double(), step.expected(), rtol=0, atol=1e-5)
