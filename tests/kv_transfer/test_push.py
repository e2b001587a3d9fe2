"""When to send: properties of the decision, and what it is learned from."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.push import (
    FORGET,
    MAX_SLOWDOWN,
    REFRESH,
    SLOWDOWN,
    WORTH,
    Estimate,
    Line,
    Mean,
    Prompt,
    Push,
    PushPolicy,
    best_sends,
    least_bytes,
    total_s,
)

SMOL = {"layers": 30, "token_bytes": 30 * 2 * 3 * 64 * 4}
"""SmolLM2-135M in float32."""
HOST = Estimate(layer_token_s=20e-6, send_s=400e-6, byte_s=0.5e-9, pack_byte_s=0.3e-9)
"""Computes a token of it in 0.6 ms, and moves 2 GB/s."""

prompts = st.builds(
    Prompt,
    nbytes=st.integers(1, 1 << 32),
    layers=st.integers(1, 32),
    tokens=st.integers(1, 100_000),
)
estimates = st.builds(
    Estimate,
    layer_token_s=st.floats(0, 1e-3),
    send_s=st.floats(0, 1e-2),
    byte_s=st.floats(0, 1e-7),
    pack_byte_s=st.floats(0, 1e-7),
    slowdown=st.floats(0, MAX_SLOWDOWN),
    rest_s=st.floats(0, 1e-1),
)


def smol(tokens: int) -> Prompt:
    return Prompt(tokens * SMOL["token_bytes"], SMOL["layers"], tokens)


@given(prompt=prompts, estimate=estimates)
def test_is_never_worse_than_one_send_by_its_own_model(prompt: Prompt, estimate: Estimate) -> None:
    sends = best_sends(prompt, estimate)
    assert 1 <= sends <= prompt.layers
    if sends > 1:
        assert total_s(prompt, estimate, sends) < total_s(prompt, estimate, 1)
        totals = [total_s(prompt, estimate, n) for n in range(2, prompt.layers + 1)]
        assert min(totals) < WORTH * total_s(prompt, estimate, 1)


@given(prompt=prompts, estimate=estimates, part=st.floats(0, 1))
def test_less_disturbance_never_makes_it_wait(
    prompt: Prompt, estimate: Estimate, part: float
) -> None:
    if best_sends(prompt, estimate) > 1:
        assert best_sends(prompt, replace(estimate, slowdown=estimate.slowdown * part)) > 1


@given(prompt=prompts, estimate=estimates, part=st.floats(0, 1))
def test_what_goes_unnoticed_anyway_is_no_reason_to_hurry(
    prompt: Prompt, estimate: Estimate, part: float
) -> None:
    """The less is left to compute when all KV stands, the more several sends are worth."""
    if best_sends(prompt, estimate) > 1:
        assert best_sends(prompt, replace(estimate, rest_s=estimate.rest_s * part)) > 1
    quiet = replace(estimate, rest_s=estimate.send_s + estimate.byte_s * prompt.nbytes)
    assert best_sends(prompt, quiet) == 1


@given(prompt=prompts, estimate=estimates)
def test_what_must_be_ready_is_a_part_or_never(prompt: Prompt, estimate: Estimate) -> None:
    least = least_bytes(prompt, estimate)
    assert least == inf or prompt.nbytes / prompt.layers <= least <= prompt.nbytes / 2


@given(prompt=prompts, estimate=estimates, data=st.data())
def test_the_model_is_what_happens_in_a_pipeline(
    prompt: Prompt, estimate: Estimate, data: st.DataObject
) -> None:
    """Against a computation and a sender that take turns for real."""
    sends = data.draw(st.integers(1, prompt.layers))
    compute_s = estimate.layer_token_s * prompt.layers * prompt.tokens
    pack_s = estimate.pack_byte_s * prompt.nbytes / sends
    send_s = estimate.send_s + estimate.byte_s * prompt.nbytes / sends
    ready_s = sent_s = 0.0
    for number in range(sends):
        beside_s = estimate.slowdown * pack_s if number else 0.0
        ready_s += compute_s / sends + beside_s
        sent_s = max(ready_s, sent_s) + send_s
    done_s = max(sent_s, ready_s + estimate.rest_s)
    assert total_s(prompt, estimate, sends) == pytest.approx(done_s, rel=1e-6, abs=1e-12)


def test_long_prompts_are_sent_by_layers_and_short_ones_whole() -> None:
    """A computation that takes as long as the transfer, as on a GPU: a fifth of the transfer, or
    less, is left to wait for.
    """
    gpu = Estimate(layer_token_s=1e-6, send_s=1e-3, byte_s=0.7e-9, pack_byte_s=0.2e-9, slowdown=0.1)
    assert least_bytes(smol(16), gpu) == inf
    prompt = smol(2048)
    sends = best_sends(prompt, gpu)
    compute_s = gpu.layer_token_s * prompt.layers * prompt.tokens
    alone_s = total_s(prompt, gpu, 1) - compute_s
    assert sends > 1
    assert total_s(prompt, gpu, sends) - compute_s <= 0.5 * alone_s
    slow = replace(gpu, layer_token_s=4e-6)
    sends = best_sends(prompt, slow)
    compute_s = slow.layer_token_s * prompt.layers * prompt.tokens
    assert total_s(prompt, slow, sends) - compute_s <= 0.2 * alone_s


def test_a_transfer_that_hardly_counts_is_not_divided() -> None:
    """On a slow CPU a prompt takes seconds and its KV milliseconds: nothing is to be gained."""
    slow = replace(HOST, layer_token_s=10 * HOST.layer_token_s)
    for tokens in (128, 1024):
        assert least_bytes(smol(tokens), slow) == inf


def test_one_layer_is_one_send() -> None:
    assert least_bytes(Prompt(1 << 30, 1, 1000), HOST) == inf


@given(
    nothing=st.floats(1e-5, 1e-2),
    byte=st.floats(1e-10, 1e-8),
    sizes=st.lists(st.integers(1000, 1 << 28), min_size=2, max_size=40),
)
def test_a_line_is_found_through_its_points(nothing: float, byte: float, sizes: list[int]) -> None:
    line = Line()
    for size in sizes:
        line.add(size, nothing + byte * size)
    intercept, slope = line.fit()
    assert intercept >= 0
    assert slope >= 0
    mean = sum(sizes) / len(sizes)
    if (
        len(set(sizes)) > 1
        and max(sizes) > 4 * min(sizes)
        and sizes[-1]
        in (
            min(sizes),
            max(sizes),
        )
    ):
        assert slope == pytest.approx(byte, rel=0.05)
        assert intercept + slope * mean == pytest.approx(nothing + byte * mean, rel=0.3)


def test_points_alike_count_half_for_each_part() -> None:
    line = Line()
    for _ in range(3):
        line.add(1000, 2.0)
    assert line.fit() == (pytest.approx(1.0), pytest.approx(1e-3))
    assert Line().fit() == (0.0, 0.0)


def test_an_average_begins_plain_and_then_fades() -> None:
    mean = Mean()
    for sample in (1.0, 2.0, 3.0):
        mean.add(sample)
    assert mean.value == pytest.approx(2.0)
    for _ in range(100):
        mean.add(7.0)
    assert mean.value == pytest.approx(7.0)


def taught(push: Push = Push.AUTO) -> PushPolicy:
    """Knows prompts of 1024 tokens on HOST."""
    policy = PushPolicy(push)
    for tokens in (64, 1024):
        nbytes = smol(tokens).nbytes
        policy.learn_send(nbytes, HOST.send_s + HOST.byte_s * nbytes)
    policy.learn_pack(1 << 20, HOST.pack_byte_s * (1 << 20))
    policy.learn_compute(1024, 30 * 1024, HOST.layer_token_s * 30 * 1024, pack_s=0.0)
    return policy


def test_sends_whole_until_prompts_about_as_long_are_measured() -> None:
    policy = PushPolicy()
    assert policy.estimate(1024) is None
    assert policy.least_bytes(smol(1024)) == inf
    policy = taught()
    assert policy.least_bytes(smol(1024)) < inf
    assert policy.least_bytes(smol(100)) == inf
    assert policy.estimate(100) is None


def test_the_estimate_is_what_was_measured() -> None:
    estimate = taught().estimate(1024)
    assert estimate is not None
    assert estimate.layer_token_s == pytest.approx(HOST.layer_token_s)
    assert estimate.send_s == pytest.approx(HOST.send_s, rel=1e-3)
    assert estimate.byte_s == pytest.approx(HOST.byte_s, rel=1e-3)
    assert estimate.pack_byte_s == pytest.approx(HOST.pack_byte_s)
    assert estimate.slowdown == SLOWDOWN


def test_a_measured_slowdown_decides_and_is_forgotten_again() -> None:
    """Packing beside the computation costs four times its own time: then all at once is better."""
    policy = taught()
    alone_s = HOST.layer_token_s * 30 * 1024
    for _ in range(20):
        policy.learn_compute(1024, 30 * 1024, alone_s + 4 * 0.05, pack_s=0.05)
    estimate = policy.estimate(1024)
    assert estimate is not None
    assert estimate.slowdown == pytest.approx(MAX_SLOWDOWN, rel=0.05)
    assert policy.least_bytes(smol(1024)) == inf
    decisions = [policy.least_bytes(smol(1024)) < inf for _ in range(int(3 / FORGET))]
    assert any(decisions), "what is no longer measured does not decide for ever"


def test_a_slowdown_means_nothing_without_the_rate_of_undisturbed_computation() -> None:
    policy = PushPolicy()
    policy.learn_compute(1024, 30 * 1024, 1.0, pack_s=0.1)
    assert policy.estimate(1024) is None


def test_what_is_left_when_all_kv_stands_is_measured() -> None:
    policy = taught()
    whole_s = HOST.send_s + HOST.byte_s * smol(1024).nbytes
    for _ in range(3):
        policy.learn_rest(1024, whole_s)
    estimate = policy.estimate(1024)
    assert estimate is not None
    assert estimate.rest_s == pytest.approx(whole_s)
    assert policy.least_bytes(smol(1024)) == inf, "a single send is over by then, too"


def test_one_prompt_in_so_many_refreshes_the_undisturbed_rate() -> None:
    policy = taught()
    decisions = [policy.least_bytes(smol(1024)) for _ in range(2 * REFRESH)]
    assert decisions.count(inf) == 2


@pytest.mark.parametrize(("push", "least"), [(Push.LAYERS, 0.0), (Push.WHOLE, inf)])
def test_the_configuration_can_force_either(push: Push, least: float) -> None:
    assert PushPolicy(push).least_bytes(smol(1024)) == least
    assert taught(push).least_bytes(smol(1024)) == least
