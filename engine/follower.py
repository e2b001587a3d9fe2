"""A rank other than 0: it runs the steps that rank 0 plans, on its own part of model and cache.

Two threads. The one that joined runs steps; the other reads, and hands orders to the KV plane at
once, so that a transfer does not wait for a step. Whatever goes wrong ends this process's part:
rank 0 notices that the connection ended, and the worker is started anew.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.core.errors import ProtocolError, RankLost
from kvferry.core.ids import Incarnation
from kvferry.engine.plan import LayerDone, Runner
from kvferry.engine.rank_channel import dial_rank_0
from kvferry.engine.rank_messages import (
    Event,
    Fault,
    Join,
    Order,
    Ready,
    Step,
    Stop,
    Welcome,
    plan_of,
)
from kvferry.engine.rank_store import RankStore


class Orders(Protocol):
    """The KV plane of this rank."""

    def handle(self, payload: bytes) -> None:
        """An order of rank 0's. Called on the reading thread."""
        ...

    def layer_listener(self, step: int) -> LayerDone | None:
        """Who wants to know when layers of a step are done, if anybody."""
        ...


class Follower:
    """Joined to rank 0. ``store`` makes the process group, ``ready`` and ``run`` follow."""

    def __init__(self, port: int, rank: int, secret: str, timeout_s: float) -> None:
        """Raises RankLost."""
        self.rank = rank
        self._channel = dial_rank_0(port, secret, timeout_s)
        self._channel.send(Join(rank))
        welcome = self._channel.receive()
        if not isinstance(welcome, Welcome):
            raise ProtocolError("between ranks: Welcome comes first")
        self.incarnation = Incarnation(welcome.incarnation)
        self.abort: Callable[[], None] = lambda: None
        """Ends what the ranks do together: this one may be waiting for rank 0, which is gone."""
        self._steps: queue.SimpleQueue[Step | Exception | None] = queue.SimpleQueue()

    @property
    def store(self) -> RankStore:
        """By which the process group is made; of no use after ``ready``."""
        return RankStore(self._channel)

    def ready(self, endpoints: tuple[str, ...]) -> None:
        """This rank has loaded, and receives KV there."""
        self._channel.send(Ready(endpoints))

    def event(self, payload: bytes) -> None:
        """The KV plane says something. Any thread; lost with the connection, which ends ``run``."""
        with contextlib.suppress(RankLost):
            self._channel.send(Event(payload))

    def run(self, runner: Runner, orders: Orders) -> None:
        """Until rank 0 says Stop. Raises RankLost when it is gone, what a step or order raised."""
        reader = threading.Thread(target=self._read, args=(orders,), name=f"orders-{self.rank}")
        reader.start()
        try:
            while (message := self._steps.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                plan = plan_of(message)
                runner.execute(plan, orders.layer_listener(plan.step))
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._channel.close()
            reader.join()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Rank 0 hears why this rank does not come to run, and the connection ends with that."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: Exception) -> None:
        """Tell rank 0 why this rank ends."""
        with contextlib.suppress(RankLost):  # it is gone itself
            self._channel.send(Fault(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """End the connection, and with it ``run``."""
        self._channel.close()

    def _read(self, orders: Orders) -> None:
        try:
            while True:
                match self._channel.receive():
                    case Step() as step:
                        self._steps.put(step)
                    case Order(payload):
                        orders.handle(payload)
                    case Stop():
                        return self._steps.put(None)
                    case message:
                        raise ProtocolError(f"between ranks: unexpected {type(message).__name__}")
        except Exception as error:  # raised on the other thread
            self.abort()
            self._steps.put(error)
