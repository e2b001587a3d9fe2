"""Sampling kernels in Triton's interpreter against the engine's own sampler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_data import NEAR, engine_rows, random_logits, random_params, rows_of, unexplained

from kvferry.engine import sampler
from kvferry.kernels.sampling import reference, wrapper
from kvferry.kernels.sampling.launches import Split, threshold_launches
from kvferry.kernels.sampling.tensors import SamplingTensors

torch.set_num_threads(1)

Seeds = st.integers(0, 2**32 - 1)


def thresholds(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    out = torch.empty(len(logits))
    for launch in threshold_launches(logits, params, out, Split.of(logits.shape[1])):
        launch.run()
    return out


def survivors(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Mask of the ids that top-k, then top-p, then min-p leave, row by row, in float64."""
    keep = torch.ones(logits.shape, dtype=torch.bool)
    for row, x in enumerate(logits.double()):
        if params.temperature[row] <= 0:
            continue
        x = x / params.temperature[row].double()
        k, p, min_p = int(params.top_k[row]), params.top_p[row], params.min_p[row]
        falling = x.sort(descending=True).values
        if k:
            keep[row] &= x >= falling[min(k, len(x)) - 1]
        if p < 1:
            mass = (x[keep[row]] - falling[0]).exp()
            above = torch.stack([mass[x[keep[row]] > value].sum() for value in x])
            keep[row] &= above < p.double() * mass.sum()
        keep[row] &= x >= falling[0] + min_p.double().log()
    return keep


def moved(params: SamplingTensors, by: float) -> SamplingTensors:
    """Filters that let through more (by > 0) or less."""
    return replace(
        params,
        top_p=torch.where(params.top_p < 1, params.top_p * (1 + by), params.top_p),
        min_p=(params.min_p * (1 - by)).clamp(max=1.0),
    )


@settings(max_examples=4)
@given(seed=Seeds, vocab_size=st.sampled_from([1, 3, 255, 256, 257, 700]))
def test_thresholds_are_exact(seed: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, params = random_logits(generator, 4, vocab_size), random_params(generator, 4)
    kept = logits >= thresholds(logits, params).unsqueeze(1)
    exact = (params.top_p == 1) & (params.min_p == 0)
    assert torch.equal(kept[exact], survivors(logits, params)[exact])
    # Sums in float32 may differ where mass is this close to the limit.
    assert bool((kept >= survivors(logits, moved(params, -NEAR))).all())
    assert bool((kept <= survivors(logits, moved(params, NEAR))).all())


@settings(max_examples=4)
@given(
    seed=Seeds,
    vocab_size=st.sampled_from([1, 5, 256, 300, 700]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    filtered=st.booleans(),
)
def test_tokens_are_those_of_the_engine(
    seed: int, vocab_size: int, dtype: torch.dtype, filtered: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((5, vocab_size + 3), torch.nan, dtype=dtype)
    logits[:, :vocab_size] = random_logits(generator, 5, vocab_size).to(dtype)
    params = random_params(generator, 5, filtered=filtered)
    got = wrapper.sample(logits, params, vocab_size)
    expected = torch.from_numpy(sampler.sample(logits, engine_rows(params), vocab_size).token_ids)
    assert unexplained(logits[:, :vocab_size], params, got.token_ids, expected) == []
    assert not got.invalid.any()


@settings(max_examples=30)
@given(seed=Seeds, vocab_size=st.sampled_from([1, 5, 300, 5000]), filtered=st.booleans())
def test_the_reference_is_the_engine(seed: int, vocab_size: int, filtered: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, 9, vocab_size)
    params = random_params(generator, 9, filtered=filtered)
    got = reference.sample(logits, params, vocab_size)
    expected = torch.from_numpy(sampler.sample(logits, engine_rows(params), vocab_size).token_ids)
    assert unexplained(logits, params, got.token_ids, expected) == []


def test_near_ties_are_rare() -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    logits = torch.randn(40, 256, generator=generator) * 3
    params = random_params(generator, 40, filtered=False, temperature=1.0)
    got = wrapper.sample(logits, params, 256).token_ids
    expected = reference.sample(logits, params, 256).token_ids
    # Two scores are within 1e-5 about once in 1e5 rows.
    assert int((got != expected).sum()) <= 1


def test_ties_at_the_top_are_broken_by_noise_at_any_temperature() -> None:
    logits = torch.zeros(12, 300)
    logits[:, [7, 280]] = 20.0
    params = random_params(torch.Generator().manual_seed(3), 12, filtered=False, temperature=1e-6)
    got = wrapper.sample(logits, params, 300).token_ids
    assert set(got.tolist()) == {7, 280}
    assert torch.equal(got, reference.sample(logits, params, 300).token_ids)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 600)
    logits[0, [599, 300, 301]] = 5.0
    params = random_params(torch.Generator().manual_seed(1), 2, temperature=0.0)
    assert wrapper.sample(logits, params, 600).token_ids.tolist() == [300, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_named_and_touches_no_other(bad: float) -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    logits = random_logits(generator, 3, 300)
    params = random_params(generator, 3, filtered=False)
    clean = wrapper.sample(logits, params, 300)
    damaged = logits.clone()
    damaged[1, 299] = bad
    got = wrapper.sample(damaged, params, 300)
    assert got.invalid.tolist() == [False, True, False]
    assert got.token_ids.tolist() == [int(clean.token_ids[0]), 0, int(clean.token_ids[2])]
    assert sampler.sample(damaged, engine_rows(params), 300).invalid == (1,)
    assert reference.sample(damaged, params, 300).invalid.tolist() == [False, True, False]


@pytest.mark.parametrize("op", [wrapper, reference])
def test_what_is_banned_is_neither_drawn_nor_invalid(op) -> None:  # type: ignore[no-untyped-def]
    """End tokens before min_tokens among it (fault B019)."""
    logits = torch.full((2, 300), -torch.inf)
    logits[0, 270] = -4.0
    for temperature in (0.0, 1.0):
        params = random_params(torch.Generator().manual_seed(1), 2, temperature=temperature)
        got = op.sample(logits, params, 300, edited=True)
        # A row in which everything is banned has nothing to offer but its first id.
        assert got.token_ids.tolist() == [270, 0]
        assert got.invalid.tolist() == [False, False]


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    logits, params = random_logits(generator, 3, 300), random_params(generator, 3)
    tokens, bits = wrapper.sample(logits, params, 300).token_ids, thresholds(logits, params)
    index = torch.tensor([2, 0])
    part = rows_of(params, index)
    assert torch.equal(thresholds(logits[index], part), bits[index])
    assert torch.equal(wrapper.sample(logits[index], part, 300).token_ids, tokens[index])


def test_leaving_the_search_out_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    logits = random_logits(generator, 4, 300)
    params = random_params(generator, 4, filtered=False)
    searched = replace(params, filtered=True)
    assert torch.equal(
        wrapper.sample(logits, params, 300).token_ids,
        wrapper.sample(logits, searched, 300).token_ids,
    )


def test_no_rows() -> None:
    params = random_params(torch.Generator(), 0)
    assert wrapper.sample(torch.empty(0, 10), params, 10).token_ids.shape == (0,)


@pytest.mark.parametrize(
    ("named", "logits", "vocab_size", "change"),
    [
        ("logits", torch.ones(2, 8, dtype=torch.float64), 8, {}),
        ("logits", torch.ones(8, 2).T, 8, {}),
        ("vocab_size", torch.ones(2, 8), 9, {}),
        ("top_k", torch.ones(2, 8), 8, {"top_k": torch.zeros(2)}),
        ("seed", torch.ones(2, 8), 8, {"seed": torch.zeros(3, dtype=torch.int64)}),
        ("top_p", torch.ones(2, 8), 8, {"top_p": torch.ones(4)[::2]}),
    ],
)
def test_bad_arguments_are_named(
    named: str, logits: torch.Tensor, vocab_size: int, change: dict[str, torch.Tensor]
) -> None:
    params = replace(random_params(torch.Generator(), 2), **change)
    with pytest.raises(ValueError, match=named):
        wrapper.sample(logits, params, vocab_size)
