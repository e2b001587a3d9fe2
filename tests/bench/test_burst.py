"""A burst among decoding sequences: how it is played, what is counted, whom it is compared to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from xml.etree import ElementTree

import pytest

from kvferry.bench import burst
from kvferry.bench.burst_load import Load, Played, Prompts, Stream, draw_prompts, play
from kvferry.bench.burst_measure import Burst, best_colocated, claims, measured, percentile, row
from kvferry.bench.burst_plot import latency_plot
from kvferry.core.config import parse_config
from kvferry.core.request import GenerateRequest, Timeline, TokenStep
from kvferry.proto import kvferry_pb2

LOAD = Load(sequences=3, sequence_len=4, settle_tokens=5, burst=2, burst_len=9, burst_tokens=2)


class Ticks:
    """A clock that steps on whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class FakeEngine:
    """Makes a token of each request whenever its turn comes; counts who came and who was closed."""

    def __init__(self, decode_limit: int | None = None) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.closed = 0
        self._decode_limit = decode_limit

    async def generate(
        self, request: GenerateRequest, sample_index: int, timeline: Timeline
    ) -> AsyncGenerator[TokenStep, None]:
        self.prompts.append(request.prompt_token_ids)
        count = request.sampling.max_tokens
        assert count is not None
        if self._decode_limit is not None:
            count = min(count, self._decode_limit)
        try:
            for _ in range(count):
                await asyncio.sleep(0)
                yield TokenStep((1,))
        finally:
            self.closed += 1

    def status(self) -> kvferry_pb2.StatusResponse:
        return kvferry_pb2.StatusResponse()

    def ready(self) -> tuple[bool, str]:
        return True, ""


def prompts() -> Prompts:
    return draw_prompts(LOAD, 50, random.Random(0))


def test_the_burst_comes_when_all_decode_and_all_outlast_it() -> None:
    engine = FakeEngine()
    played = asyncio.run(play(engine, LOAD, prompts(), Ticks()))
    assert [len(prompt) for prompt in engine.prompts] == [4, 4, 4, 9, 9]
    assert engine.closed == 5
    for stream in played.sequences:
        assert stream.seen_s[0] < played.decoding_s
        settled = [at for at in stream.seen_s if played.decoding_s < at < played.began_s]
        assert len(settled) >= LOAD.settle_tokens - 1
        assert stream.seen_s[-1] > played.ended_s
    for stream in played.burst:
        assert stream.sent_s > played.began_s
        assert len(stream.seen_s) == LOAD.burst_tokens
        assert stream.seen_s[-1] < played.ended_s


def test_a_sequence_that_does_not_outlast_the_burst_is_an_error() -> None:
    load = Load(sequences=2, settle_tokens=2, most_tokens=8, burst=1, burst_len=9, burst_tokens=50)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(play(FakeEngine(), load, draw_prompts(load, 9, random.Random(0)), Ticks()))
    assert caught.group_contains(RuntimeError, match="before the burst did")


def test_a_request_that_stops_early_is_an_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(play(FakeEngine(decode_limit=3), LOAD, prompts(), Ticks()))
    assert caught.group_contains(AssertionError, match="3 tokens arrived")


def stream(sent_s: float, *seen_s: float) -> Stream:
    return Stream(sent_s=sent_s, seen_s=list(seen_s))


def test_gaps_that_touch_the_window_count() -> None:
    played = Played(
        sequences=[stream(0, 1.0, 2.0, 4.0, 10.5, 20.0, 30.5, 31.5), stream(0, 1.5, 9.0, 41.0)],
        burst=[stream(10.0, 15.0, 18.0, 30.0)],
        decoding_s=1.5,
        began_s=10.0,
        ended_s=30.0,
    )
    found = measured(played, prompt_tokens=100)
    # 4.0 to 10.5 was open when the burst came, 20.0 to 30.5 and 9.0 to 41.0 when it ended.
    assert sorted(found.latencies_s) == [3.0, 6.5, 9.5, 10.5, 12.0, 32.0]
    assert found.before_s == pytest.approx((2.0 + 7.5) / 2)
    assert found.ttfts_s == [5.0]
    assert found.first_gaps_s == [3.0]
    assert found.output_tokens == 5
    assert found.output_rate == pytest.approx(0.25)
    assert found.rate == pytest.approx(5.25)


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([3.0], 0.99) == 3.0


def made(p99_s: float, rate: float, ttft_s: float = 1.0) -> Burst:
    return Burst(
        latencies_s=[0.1] * 50 + [p99_s] * 50,
        before_s=0.1,
        ttfts_s=[ttft_s],
        first_gaps_s=[p99_s / 2],
        window_s=2.0,
        prompt_tokens=round(rate * 2) - 4,
        output_tokens=4,
    )


def test_the_best_is_the_steadiest_that_is_as_fast() -> None:
    colocated = {
        "slow": [made(0.1, 90)],
        "steady": [made(0.2, 100)],
        "fast": [made(0.5, 150)],
    }
    assert best_colocated([made(0.3, 100)], colocated) == "steady"
    assert best_colocated([made(0.3, 101)], colocated) == "fast"
    assert best_colocated([made(0.3, 80)], colocated) == "slow"
    assert best_colocated([made(0.3, 200)], colocated) == "fast"


def test_claims_compare_round_by_round_and_promise_nothing() -> None:
    pd = [made(0.2, 50, 4.0), made(0.4, 50, 8.0), made(0.2, 50, 4.0)]
    colocated = [made(0.4, 100, 2.0), made(0.8, 100, 4.0), made(0.1, 100, 2.0)]
    found = {claim.id: claim for claim in claims(pd, colocated)}
    assert {name: claim.value for name, claim in found.items()} == {
        "burst_p99_itl_ratio": pytest.approx(0.5),
        "burst_throughput_ratio": pytest.approx(0.5),
        "burst_ttft_ratio": pytest.approx(2.0),
    }
    assert all(claim.goal is None and claim.n == 3 for claim in found.values())


def test_a_row_holds_medians_and_the_longest_of_all_rounds() -> None:
    found = row([made(0.2, 50), made(0.4, 60), made(0.3, 70)])
    assert found["ITL p50 ms"] == pytest.approx(100)
    assert found["ITL p99 ms"] == pytest.approx(300)
    assert found["ITL max ms"] == pytest.approx(400)
    assert found["1st gap max ms"] == pytest.approx(200)
    assert found["prompt tokens/s"] == pytest.approx(58)


def test_the_plot_has_a_line_per_system_and_percentiles_below() -> None:
    found = {"ours": [made(0.2, 50)], "theirs": [made(0.4, 60), made(0.8, 60)]}
    root = ElementTree.fromstring(latency_plot(found, {"ours"}))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"ours", "theirs", "0", "90", "99"} <= texts
    lines = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if p.get("fill") == "none"]
    assert [line.get("stroke-dasharray") is not None for line in lines] == [False, True]


@pytest.mark.parametrize("threads", [2, 8])
def test_every_system_has_the_same_threads_in_all(threads: int) -> None:
    known = burst.contenders(threads, burst.BurstSizes().budgets)
    assert len({contender.name for contender in known}) == 9
    for contender in known:
        config = parse_config(contender.config)
        pools = (config.prefill, config.decode)
        assert sum(pool.workers * pool.threads for pool in pools) == threads
        if contender.budget is not None:
            assert config.decode.max_batch_tokens == contender.budget


def test_budgets_are_those_that_the_claims_are_about() -> None:
    _, *colocated = burst.contenders(2, burst.BurstSizes().budgets)
    for layout in ("colocated, 1 x 2 threads", "colocated, 2 x 1 thread"):
        assert [c.budget for c in colocated if c.layout == layout] == [64, 128, 256, 512]


def test_an_odd_number_of_threads_cannot_be_shared_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        burst.run(["--threads", "3"])
    assert "even number" in capsys.readouterr().err
