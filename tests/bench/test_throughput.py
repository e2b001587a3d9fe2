"""Costs, rates and shares: the arithmetic, on engines of known speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.bench.costs import attention_flops, decode_costs, head_weights, prefill_costs
from kvferry.bench.engine_claims import peak_claim, peer_claims
from kvferry.bench.limits import Limits, measure_limits
from kvferry.bench.throughput import PREFILL, Rates, Sizes, Timing, measure_rates, rate_rows
from kvferry.models.decoder import Decoder
from kvferry.models.spec import ModelSpec, read_spec

SIZES = Sizes(prefill_len=4, prompt_len=3, num_tokens=3, batches=(1, 2), repeats=2)


class SteadyEngine:
    """One second per prompt token, half a second per step; keeps what it was asked."""

    name = "steady"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def timing(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        (length,) = {len(prompt) for prompt in prompts}
        self.asked.append((len(prompts), length, num_tokens))
        return Timing(float(length * len(prompts)), 0.5 * (num_tokens - 1))


@pytest.fixture
def spec(tiny_folder: Path) -> ModelSpec:
    return read_spec(tiny_folder)


def test_weights_counted_are_those_of_the_decoder(spec: ModelSpec) -> None:
    matrices = [p for name, p in Decoder(spec).named_parameters() if "norm" not in name]
    elements = sum(matrix.numel() for matrix in matrices) - head_weights(spec)  # the embedding
    one = decode_costs(spec, batch=1, contexts=[0])
    assert one.nbytes == 4 * elements
    assert one.flops == 2 * elements + attention_flops(spec, 1)


def test_a_prompt_costs_what_its_tokens_cost_one_by_one(spec: ModelSpec) -> None:
    whole = prefill_costs(spec, 5)
    steps = decode_costs(spec, batch=1, contexts=range(5))
    # Only the last position of a prompt gets logits.
    assert whole.flops == steps.flops - 4 * 2 * head_weights(spec)
    assert whole.nbytes == decode_costs(spec, 1, [0]).nbytes


def test_kv_is_read_by_each_sequence(spec: ModelSpec) -> None:
    alone, both = (decode_costs(spec, batch, [7]).nbytes for batch in (1, 2))
    assert both - alone == 7 * spec.kv_elements_per_token * 4


def test_rates_are_tokens_over_seconds() -> None:
    first, second = SteadyEngine(), SteadyEngine()
    found = measure_rates([first, second], 50, SIZES)
    assert [rates.name for rates in found] == ["steady", "steady"]
    for rates in found:
        assert rates.prefill == [1.0, 1.0]
        assert rates.decode == {1: [2.0, 2.0], 2: [4.0, 4.0]}
    assert first.asked == second.asked
    assert first.asked[1:] == [(1, 4, 1)] * 2 + [(1, 3, 3)] * 2 + [(2, 3, 3)] * 2


def test_rows_hold_ratio_and_shares(spec: ModelSpec) -> None:
    ours = Rates("ours", [8.0], {1: [3.0], 2: [6.0]})
    peers = [Rates("slow", [2.0], {1: [1.0]}), Rates("fast", [4.0], {1: [6.0]})]
    limits = Limits(threads=1, flops_per_s=1e9, bytes_per_s=1e6)
    rows = rate_rows(ours, peers, spec, SIZES, limits)
    assert [(row["what"], row["engine"]) for row in rows] == [
        ("prefill, 4 tokens", "ours"),
        ("prefill, 4 tokens", "slow"),
        ("prefill, 4 tokens", "fast"),
        ("decode, batch 1", "ours"),
        ("decode, batch 1", "slow"),
        ("decode, batch 1", "fast"),
        ("decode, batch 2", "ours"),
    ]
    assert [row["of best peer"] for row in rows] == [2.0, None, None, 0.5, None, None, None]
    assert rows[0]["of FLOP/s"] == pytest.approx(prefill_costs(spec, 4).flops / 0.5 / 1e9)
    steps = decode_costs(spec, 2, [3, 4])
    assert rows[-1]["of bytes/s"] == pytest.approx(steps.nbytes / (4 / 6.0) / 1e6)


def test_a_rate_is_the_median_of_its_repeats() -> None:
    rates = Rates("x", [1.0, 9.0, 2.0])
    assert (rates.median(PREFILL), rates.median(8)) == (2.0, 0.0)


def test_limits_are_positive() -> None:
    limits = measure_limits(1, product_size=32, read_bytes=1 << 16, repeats=2)
    assert limits.flops_per_s > 0
    assert limits.bytes_per_s > 0


def test_claims_are_over_the_best_peer_and_promised_only_beside_all() -> None:
    ours = Rates("ours", [8.0, 10.0, 9.0], {1: [3.0], 2: [6.0]})
    peers = [Rates("slow", [2.0], {1: [1.0]}), Rates("fast", [4.5], {1: [6.0]})]
    claims = {claim.id: claim for claim in peer_claims(ours, peers, SIZES)}
    assert {name: claim.value for name, claim in claims.items()} == {
        "prefill_vs_best": 2.0,
        "decode_b1_vs_best": 0.5,
    }
    assert all(claim.goal is None for claim in claims.values())
    every = peer_claims(ours, [*peers, Rates("third", [1.0], {2: [3.0]})], SIZES)
    assert {claim.id: claim.met for claim in every} == {
        "prefill_vs_best": True,
        "decode_b1_vs_best": False,
        "decode_b2_vs_best": None,
    }


def test_the_share_of_the_peak_counts_products_and_attention(spec: ModelSpec) -> None:
    limits = Limits(threads=1, flops_per_s=prefill_costs(spec, 4).flops / 0.25, bytes_per_s=1.0)
    claim = peak_claim(Rates("ours", [8.0]), spec, SIZES, limits)
    assert claim.value == pytest.approx(0.5)
    assert claim.met is False
