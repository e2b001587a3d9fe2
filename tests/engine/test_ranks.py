"""Rank 0 and the others: joining, steps in order, events, strangers, ranks that die."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from step_plans import step_plan

from kvferry.core.errors import RankLost
from kvferry.engine.follower import Follower
from kvferry.engine.parallel_runner import ParallelRunner
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.rank_channel import dial_rank_0
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.rank_messages import Join, Order, decode, encode, plan_of, step_message

SECRET = "ranks-secret"
WAIT_S = 20.0


class Recorder:
    """Stands in for a runner and a KV plane."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.plans: list[StepPlan] = []
        self.orders: list[bytes] = []
        self._fail = fail

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        if self._fail is not None:
            raise self._fail
        self.plans.append(plan)
        return StepResult(np.arange(len(plan.sampled)))

    def handle(self, payload: bytes) -> None:
        self.orders.append(payload)

    def layer_listener(self, step: int) -> LayerDone | None:
        return None


class Worker:
    """Rank 0 and threads for the others, joined."""

    def __init__(self, others: list[Recorder]) -> None:
        self.group = RankGroup(len(others) + 1, SECRET)
        self._threads = ThreadPoolExecutor(len(others))
        self.followers: dict[int, Follower] = {}
        self.runs: list[Future[None]] = [
            self._threads.submit(self._follow, rank, other)
            for rank, other in enumerate(others, start=1)
        ]
        self.group.join_all(WAIT_S)
        self.endpoints = self.group.wait_ready(WAIT_S)

    def _follow(self, rank: int, other: Recorder) -> None:
        follower = Follower(self.group.port, rank, SECRET, WAIT_S)
        self.followers[rank] = follower
        follower.ready((f"shm:{rank}",))
        follower.run(other, other)

    def close(self) -> None:
        self.group.close()
        self._threads.shutdown()


@pytest.fixture
def start() -> Iterator[Callable[[list[Recorder]], Worker]]:
    workers: list[Worker] = []

    def start_one(others: list[Recorder]) -> Worker:
        workers.append(Worker(others))
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.close()


def plan_at(number: int) -> StepPlan:
    """One row of three tokens."""
    return replace(step_plan([[1, 2, number]], [0], [[3, 4]]), step=number)


def test_steps_and_orders_reach_every_rank_in_order(
    start: Callable[[list[Recorder]], Worker],
) -> None:
    others, first = [Recorder(), Recorder()], Recorder()
    worker = start(others)
    assert worker.endpoints == [("shm:1",), ("shm:2",)]
    assert worker.followers[2].incarnation == worker.group.incarnation
    runner = ParallelRunner(first, worker.group)
    for number in range(5):
        worker.group.send(Order(b"%d" % number))
        runner.execute(plan_at(number))
    worker.close()
    for run in worker.runs:
        run.result()
    for other in others:
        assert other.orders == [b"0", b"1", b"2", b"3", b"4"]
        assert [plan.step for plan in other.plans] == [0, 1, 2, 3, 4]
        for ours, theirs in zip(first.plans, other.plans, strict=True):
            np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(ours.block_tables, theirs.block_tables)
            np.testing.assert_array_equal(ours.sampled, theirs.sampled)


def test_events_arrive_with_their_rank(start: Callable[[list[Recorder]], Worker]) -> None:
    worker = start([Recorder(), Recorder()])
    heard: list[tuple[int, bytes]] = []
    both = threading.Semaphore(0)

    def hear(rank: int, payload: bytes) -> None:
        heard.append((rank, payload))
        both.release()

    worker.group.on_event = hear
    for rank, follower in worker.followers.items():
        follower.event(b"of %d" % rank)
    assert both.acquire(timeout=WAIT_S)
    assert both.acquire(timeout=WAIT_S)
    assert sorted(heard) == [(1, b"of 1"), (2, b"of 2")]


def test_a_rank_that_fails_is_known_at_once(start: Callable[[list[Recorder]], Worker]) -> None:
    worker = start([Recorder(), Recorder(fail=ValueError("no memory"))])
    lost = threading.Event()
    reasons: list[str] = []

    def on_lost(why: str) -> None:
        reasons.append(why)
        lost.set()

    worker.group.on_lost = on_lost
    runner = ParallelRunner(Recorder(), worker.group)
    runner.execute(plan_at(0))
    assert lost.wait(WAIT_S)
    assert reasons == ["rank 2: ValueError: no memory"]
    with pytest.raises(RankLost, match="rank 2"):
        runner.execute(plan_at(0))
    assert isinstance(worker.runs[1].exception(), ValueError)


def test_a_step_that_fails_on_rank_0_is_the_end_of_the_worker(
    start: Callable[[list[Recorder]], Worker],
) -> None:
    worker = start([Recorder()])
    runner = ParallelRunner(Recorder(fail=ValueError("bad row")), worker.group)
    with pytest.raises(RankLost, match="rank 0: step 7 failed: bad row"):
        runner.execute(plan_at(7))


def test_a_rank_whose_rank_0_is_gone_ends(start: Callable[[list[Recorder]], Worker]) -> None:
    worker = start([Recorder()])
    worker.group._channels[1].close()  # as the kernel does for a process that was killed
    with pytest.raises(RankLost):
        worker.runs[0].result(WAIT_S)


def test_strangers_are_turned_away_and_the_ranks_still_come() -> None:
    group = RankGroup(2, SECRET)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(group.join_all, WAIT_S)
        with pytest.raises(RankLost, match="is not rank 0"):
            dial_rank_0(group.port, "another secret", WAIT_S)
        for noise in (b"\x80\x04pickle", b"\xff" * 64, b""):
            with socket.create_connection(("127.0.0.1", group.port), WAIT_S) as stranger:
                stranger.sendall(noise)
        follower = Follower(group.port, 1, SECRET, WAIT_S)
        joining.result(WAIT_S)
    follower.close()
    group.close()


def test_a_rank_that_never_comes_is_not_waited_for_without_end() -> None:
    group = RankGroup(3, SECRET)
    with pytest.raises(RankLost, match="2 ranks did not come"):
        group.join_all(0.05)
    group.close()


def test_plans_travel_whole() -> None:
    plan = replace(step_plan([[5, 6, 7], [1]], [0, 4], [[2, 9], [3, 4]]), step=12)
    sent = decode(encode(step_message(plan)))
    there = plan_of(sent)  # type: ignore[arg-type]
    for name in ("token_ids", "query_lens", "context_lens", "block_tables", "sampled"):
        ours, theirs = getattr(plan, name), getattr(there, name)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert there.step == 12


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Join(1))[:-1], b"\x80\x04."])
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(frame)
