"""Attention over int8 and FP8 caches, against attention over the values that these stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_plans import scattered_tables, step_plan

from kvferry.cache.paged import PagedKV
from kvferry.engine.attention import PagedAttention
from kvferry.engine.quantised_attention import QuantisedAttention
from kvferry.engine.step_tensors import StepTensors
from kvferry.kernels.kv_layer import dequantised, quantised
from kvferry.models.decoder import Heads

BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 4, 8, 6, 2
DTYPES = [torch.int8, torch.float8_e4m3fn]


class Pair:
    """One random step twice: on a quantised cache, and on a float64 one of the same values."""

    def __init__(self, lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
        query_lens, context_lens = ([pair[i] for pair in lens] for i in (0, 1))
        lengths = np.add(query_lens, context_lens).tolist()
        tables, count = scattered_tables(lengths, BLOCK_SIZE, np.random.default_rng(1))
        plan = step_plan([[0] * n for n in query_lens], context_lens, tables)
        self.tensors = StepTensors.build(plan, BLOCK_SIZE, "cpu")
        self.quantised, self.exact = (
            PagedKV.allocate(
                num_layers=2,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                block_size=BLOCK_SIZE,
                num_blocks=count,
                dtype=kind,
            )
            for kind in (dtype, torch.float64)
        )
        generator = torch.Generator().manual_seed(sum(lengths))
        values = torch.randn(self.exact.tensor.shape, generator=generator) * 3
        elements, scales = quantised(values, dtype)
        assert scales is not None
        assert self.quantised.scales is not None
        self.quantised.tensor.view(torch.int8).copy_(elements.view(torch.int8))
        self.quantised.scales.copy_(scales)
        self.exact.tensor.copy_(dequantised(elements, scales))

        def draw(num_heads: int) -> torch.Tensor:
            shape = sum(query_lens), num_heads, HEAD_DIM
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q, self.k, self.v = draw(NUM_HEADS), draw(NUM_KV_HEADS), draw(NUM_KV_HEADS)
        self.dtype = dtype

    def held(self, x: torch.Tensor) -> torch.Tensor:
        return dequantised(*quantised(x, self.dtype)).double()

    def attend(self) -> torch.Tensor:
        return QuantisedAttention(self.quantised, self.tensors)(1, heads(self.q, self.k, self.v))

    def expected(self) -> torch.Tensor:
        new = heads(self.q, self.held(self.k), self.held(self.v))
        return PagedAttention(self.exact, self.tensors)(1, new)


def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
    """Heads whose rotation is by no angle."""
    zero = q.new_zeros(len(q), HEAD_DIM // 2)
    return Heads(q, k, v, zero.cos(), zero.sin())


LENS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=6)


@given(LENS, st.sampled_from(DTYPES))
def test_it_is_attention_over_the_values_that_the_cache_holds(
    lens: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    pair = Pair(lens, dtype)
    untouched = pair.quantised.tensor.view(torch.int8).clone(), pair.quantised.scales.clone()
    torch.testing.assert_close(pair.attend(), pair.expected(), rtol=0, atol=1e-12)
    written = pair.tensors.slots
    slots, scales = pair.quantised.slots.view(torch.int8), pair.quantised.scales.flatten(2, 3)
    for part, x in enumerate((pair.k, pair.v)):
        elements, scale = quantised(x, dtype)
        assert torch.equal(slots[1, part, written], elements.view(torch.int8))
        assert torch.equal(scales[1, part, written], scale)
    slots[1, :, written] = untouched[0].flatten(2, 3)[1, :, written]
    scales[1, :, written] = untouched[1].flatten(2, 3)[1, :, written]
    assert torch.equal(pair.quantised.tensor.view(torch.int8), untouched[0])
    assert torch.equal(pair.quantised.scales, untouched[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_sequence_spares_its_neighbours(dtype: torch.dtype) -> None:
    pair = Pair([(1, 9), (1, 50), (1, 45), (4, 7)], dtype)
    # Short sequences attend together, in one padded batch.
    pair.k[1] = torch.nan
    got = pair.attend()
    assert got[1].isnan().all()
    assert torch.isfinite(got[[0, 2, 3, 4, 5, 6]]).all()
