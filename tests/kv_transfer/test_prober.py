"""The thread that measures: which paths, when again, what it tells, how it ends."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from fake_transports import ENDPOINTS, PEER, TRANSPORTS

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.choices import Choices, Path
from kvferry.kv_transfer.endpoints import Medium
from kvferry.kv_transfer.probe import Speed
from kvferry.kv_transfer.prober import AGAIN_S, MAX_AGAIN_S, Prober
from kvferry.kv_transfer.threads import join_all

WAIT_S = 20.0


class Rig:
    """A prober whose measurements are the test's."""

    def __init__(self) -> None:
        self.choices = Choices(transports=TRANSPORTS)
        self.found: dict[str, Speed | Exception] = {
            "fast:1": Speed(2e9, 3e9, 1e-4),
            "slow:1": Speed(1e9, 3e9, 1e-3),
        }
        self.asked: list[str] = []
        self.threads: list[threading.Thread] = []
        """Those that measured, by ``asked``."""
        self.probed: queue.Queue[Any] = queue.Queue()
        self.go, self.measuring = threading.Event(), threading.Event()
        self.go.set()
        self.peaks: list[Medium] = []
        self.prober = Prober(self.choices, self._measure, self.probed.put, self._peak)

    def _measure(self, endpoint: str) -> Speed:
        self.asked.append(endpoint)
        self.threads.append(threading.current_thread())
        self.measuring.set()
        assert self.go.wait(WAIT_S)
        found = self.found[endpoint]
        if isinstance(found, Exception):
            raise found
        return found

    def _peak(self, medium: Medium) -> float:
        self.peaks.append(medium)
        return {Medium.MEMORY: 4e9, Medium.NETWORK: 2e9, Medium.DEVICE: 0.0}[medium]

    def probe(self, peer: Incarnation = PEER) -> dict[str, Path]:
        self.prober.probe(peer, 0, ENDPOINTS)
        return self.next()

    def next(self) -> dict[str, Path]:
        return {path.transport: path for path in self.probed.get(timeout=WAIT_S).paths}


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.go.set()
    join_all(made.prober.stop(), WAIT_S)


def test_measures_what_can_be_used_and_takes_the_fastest(rig: Rig) -> None:
    paths = rig.probe()
    assert rig.asked == ["fast:1", "slow:1"]
    fast, slow = paths["fast"], paths["slow"]
    assert (fast.rate, fast.peak, fast.round_trip_s, fast.chosen) == (2e9, 4e9, 1e-4, True)
    assert (slow.rate, slow.peak, slow.chosen) == (1e9, 2e9, False)
    assert paths["absent"].why_not == "no device"
    assert rig.choices.choose(PEER, 0, ENDPOINTS) == "fast:1"


@pytest.mark.parametrize(
    "error",
    [LinkRefused("nobody listens"), LinkLost("no answer"), ProtocolError("gibberish")],
    ids=lambda error: type(error).__name__,
)
def test_a_path_that_cannot_be_measured_is_not_taken(rig: Rig, error: Exception) -> None:
    rig.found["fast:1"] = error
    paths = rig.probe()
    assert paths["fast"].why_not == str(error)
    assert paths["slow"].chosen


def test_a_path_to_another_host_is_compared_to_a_bare_stream_over_it() -> None:
    rig = Rig()
    rig.found["slow:10.1.2.3:80"] = rig.found["slow:127.0.0.1:80"] = rig.found["slow:1"]
    try:
        for endpoint in ("slow:10.1.2.3:80", "slow:127.0.0.1:80"):
            rig.prober.probe(PEER, 0, (endpoint,))
            path = rig.next()["slow"]
            assert path.peak == (3e9 if "10.1" in endpoint else 2e9)
        assert rig.peaks == [Medium.NETWORK]
    finally:
        join_all(rig.prober.stop(), WAIT_S)


def test_the_same_rank_is_not_measured_twice_at_once(rig: Rig) -> None:
    rig.go.clear()
    rig.prober.probe(Incarnation(1), 0, ENDPOINTS)
    assert rig.measuring.wait(WAIT_S)
    for _ in range(3):
        rig.prober.probe(PEER, 0, ENDPOINTS)
    rig.go.set()
    assert [rig.probed.get(timeout=WAIT_S).peer for _ in range(2)] == [1, PEER]
    rig.prober.probe(Incarnation(2), 0, ENDPOINTS)
    assert rig.probed.get(timeout=WAIT_S).peer == 2
    assert len(rig.asked) == 6


def test_a_broken_path_is_measured_again_later_each_time() -> None:
    """On a clock of the test's own: what is due later waits for its turn."""
    now = [100.0]
    rig = Rig()
    waits: list[float] = []

    class Recording(Prober):
        def probe(self, *arguments: Any) -> None:
            waits.append(arguments[3])

    prober = Recording(rig.choices, rig._measure, clock=lambda: now[0])
    rig.choices.choose(PEER, 0, ENDPOINTS)
    for _ in range(1100):
        path = rig.choices.failed(PEER, 0, "fast:1", "reset")
        assert path is not None
        prober.broken(path, ENDPOINTS)
    assert waits[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert waits[-1] == MAX_AGAIN_S


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_costs_the_rank_that_met_it_and_no_other(rig: Rig) -> None:
    rig.go.clear()
    rig.found["fast:1"] = RuntimeError("out of memory")
    rig.prober.probe(PEER, 0, ENDPOINTS)
    assert rig.measuring.wait(WAIT_S)
    rig.prober.probe(Incarnation(3), 0, ("slow:1",))
    rig.go.set()
    assert rig.probed.get(timeout=WAIT_S).peer == 3
    rig.found["fast:1"] = rig.found["slow:1"]
    assert rig.probe()["fast"].rate == 1e9
    # What it died of is told before it is joined: in this test, which expects it.
    rig.threads[0].join(WAIT_S)


def test_a_medium_that_cannot_be_measured_leaves_the_path_its_rate(rig: Rig) -> None:
    def no_time(medium: Medium) -> float:
        raise TimeoutError

    prober = Prober(rig.choices, rig._measure, rig.probed.put, no_time)
    prober.probe(PEER, 0, ENDPOINTS)
    assert (rig.next()["fast"].rate, rig.choices.rows()[0].peak) == (2e9, 0.0)
    join_all(prober.stop(), WAIT_S)


def test_what_is_asked_for_now_goes_before_what_is_due_later(rig: Rig) -> None:
    rig.prober.probe(PEER, 0, ENDPOINTS, 1000.0)
    rig.prober.probe(Incarnation(3), 0, ENDPOINTS)
    assert rig.probed.get(timeout=WAIT_S).peer == 3
    rig.prober.probe(PEER, 0, ENDPOINTS)
    assert rig.probed.get(timeout=WAIT_S).peer == PEER
    assert rig.probed.empty()


def test_what_is_due_now_is_not_put_off(rig: Rig) -> None:
    rig.go.clear()
    rig.prober.probe(Incarnation(1), 0, ENDPOINTS)
    assert rig.measuring.wait(WAIT_S)
    rig.prober.probe(PEER, 0, ENDPOINTS)
    rig.prober.probe(PEER, 0, ENDPOINTS, 1000.0)
    rig.go.set()
    assert [rig.probed.get(timeout=WAIT_S).peer for _ in range(2)] == [1, PEER]


def test_closing_ends_what_waits_and_nothing_is_measured_after() -> None:
    rig = Rig()
    rig.prober.probe(PEER, 0, ENDPOINTS, 1000.0)
    join_all(rig.prober.stop(), WAIT_S)
    rig.prober.probe(PEER, 0, ENDPOINTS)
    join_all(rig.prober.stop(), WAIT_S)
    assert rig.asked == []


def test_closing_waits_for_the_path_that_is_being_measured() -> None:
    rig = Rig()
    rig.go.clear()
    rig.prober.probe(PEER, 0, ENDPOINTS)
    assert rig.measuring.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="kv-prober"):
        join_all(rig.prober.stop(), 0.05)
    rig.go.set()
    join_all(rig.prober.stop(), WAIT_S)
    assert rig.asked == ["fast:1"]
    assert rig.probed.empty()
