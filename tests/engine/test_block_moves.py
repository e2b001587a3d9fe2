"""Moves of whole blocks, against plain indexing; every element type, scales included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache.paged import PagedKV
from kvferry.engine.block_moves import BLOCKS_AT_ONCE, move_blocks
from kvferry.engine.fake_runner import FakeRunner
from kvferry.engine.plan import SamplingRows, StepPlan

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.float8_e4m3fn,
)
NUM_BLOCKS, NUM_SLOTS = 12, 5


def plan_of(**moves: list[tuple[int, int]]) -> StepPlan:
    """A step that moves blocks and computes nothing."""
    none = np.zeros(0, np.int32)
    arrays = {k: np.array(v, np.int32).reshape(-1, 2) for k, v in moves.items()}
    return StepPlan(
        step=1,
        token_ids=np.zeros(0, np.int64),
        query_lens=none,
        context_lens=none,
        block_tables=np.zeros((0, 0), np.int32),
        sampled=none,
        sampling=SamplingRows.greedy(0),
        **arrays,
    )


def cache(dtype: torch.dtype, num_slots: int = NUM_SLOTS, num_blocks: int = NUM_BLOCKS) -> PagedKV:
    """Random bytes everywhere."""
    kv = PagedKV.allocate(
        num_layers=2,
        num_kv_heads=3,
        head_dim=4,
        block_size=2,
        num_blocks=num_blocks,
        dtype=dtype,
        num_host_slots=num_slots,
    )
    for tensor in (kv.tensor, kv.host, kv.scales, kv.host_scales):
        if tensor is not None:
            tensor.view(torch.uint8).random_(0, 256)
    return kv


def contents(kv: PagedKV) -> dict[str, torch.Tensor]:
    tensors = {"kv": kv.tensor, "host": kv.host, "scales": kv.scales, "hs": kv.host_scales}
    return {k: t.view(torch.uint8).clone() for k, t in tensors.items() if t is not None}


pairs = st.tuples(
    st.permutations(range(NUM_BLOCKS)), st.permutations(range(NUM_SLOTS)), st.integers(0, NUM_SLOTS)
).map(lambda drawn: list(zip(drawn[0], drawn[1], strict=False))[: drawn[2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(out=pairs, back=pairs, copied=st.permutations(range(NUM_BLOCKS)), num=st.integers(0, 6))
def test_out_then_in_then_copies(
    dtype: torch.dtype,
    out: list[tuple[int, int]],
    back: list[tuple[int, int]],
    copied: list[int],
    num: int,
) -> None:
    kv = cache(dtype)
    copies = list(zip(copied[:num], copied[6 : 6 + num], strict=True))
    expected = contents(kv)
    for device, host in (("kv", "host"), ("scales", "hs")):
        if device not in expected:
            continue
        for block, slot in out:
            expected[host][:, :, slot] = expected[device][:, :, block]
        for block, slot in back:
            expected[device][:, :, block] = expected[host][:, :, slot]
        for source, target in copies:
            expected[device][:, :, target] = expected[device][:, :, source]
    swap_in = [(slot, block) for block, slot in back]
    move_blocks(kv, plan_of(swap_out=out, swap_in=swap_in, copies=copies))
    found = contents(kv)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_more_blocks_than_are_gathered_at_once() -> None:
    count = 2 * BLOCKS_AT_ONCE + 3
    kv = cache(torch.float32, num_slots=count, num_blocks=count)
    before = contents(kv)["kv"]
    move_blocks(kv, plan_of(swap_out=[(i, count - 1 - i) for i in range(count)]))
    assert torch.equal(contents(kv)["host"], before.flip(2))


@pytest.mark.parametrize("kind", ["swap_out", "swap_in"])
def test_a_swap_without_host_slots_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="no host slots"):
        move_blocks(cache(torch.float32, num_slots=0), plan_of(**{kind: [(0, 0)]}))


def test_a_step_of_moves_alone_is_legal() -> None:
    kv = cache(torch.float64)
    result = FakeRunner(kv, 97).execute(plan_of(copies=[(1, 2)]))
    assert not len(result.token_ids)
    found = contents(kv)["kv"]
    assert torch.equal(found[:, :, 1], found[:, :, 2])
