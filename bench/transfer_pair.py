"""Two processes of the transfer bench, one that sends and one that receives, seen from outside."""

from __future__ import annotations

import itertools
import multiprocessing
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvferry.bench.transfer_cache import Copier, Walk
from kvferry.bench.transfer_copy import Copying
from kvferry.bench.transfer_orders import (
    Answer,
    Copied,
    Copy,
    Expect,
    Load,
    Loaded,
    Open,
    Opened,
    Order,
    Prefill,
    Prefilled,
    Send,
    Sent,
    Usage,
    Used,
    decode_answer,
    encode,
)
from kvferry.bench.transfer_side import serve
from kvferry.core.errors import StartupError
from kvferry.kv_transfer.layout import KvLayout

SOURCE_ORDER, TARGET_ORDER = 1, 2
"""Seeds of the orders in which blocks stand."""
ANSWER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both sides hold."""

    source: KvLayout
    target: KvLayout
    wire: str
    tokens: int
    """Held; a transfer moves some of them."""
    walked: int
    """The first of them, that transfers take turns in unless they are longer."""
    in_order: bool = False
    """Whether blocks stand one after the other."""
    copier: Copier = Copier.BEST

    def nbytes(self, tokens: int) -> int:
        """On the wire."""
        return tokens * self.on_wire.token_bytes

    def walk(self, tokens: int) -> Walk:
        """Of transfers of so many. They begin at whole blocks of both sides."""
        whole = max(self.source.block_size, self.target.block_size)
        return Walk(tokens, max(tokens, self.walked), whole)

    @property
    def on_wire(self) -> KvLayout:
        return KvLayout(
            num_layers=self.source.num_layers,
            num_kv_heads=self.source.num_kv_heads,
            head_dim=self.source.head_dim,
            block_size=self.source.block_size,
            dtype=self.wire,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Some transfers, one after the other or several at once."""

    latencies_s: Sequence[float]
    wall_s: float
    cpu_s: float
    """Of both processes."""

    @property
    def per_s(self) -> float:
        """Transfers per second."""
        return len(self.latencies_s) / self.wall_s


class Pair:
    """Sender and receiver in two processes; ``loopback`` keeps to the sender's."""

    def __init__(self, source: Connection, target: Connection) -> None:
        self._source, self._target = source, target
        self._numbers = itertools.count(1)
        self._setting: Setting | None = None
        self._endpoints: dict[str, str] = {}
        self._longest = 0
        """Tokens of the longest prompt; all begin where the sequence does."""

    def open(self, setting: Setting, transports: Sequence[str]) -> None:
        """Begin anew with other caches."""
        far = [name for name in transports if name != "loopback"]
        near = [name for name in transports if name == "loopback"]
        self._setting = setting
        self._endpoints = {}
        for pipe, layout, names, seed in (
            (self._source, setting.source, near, SOURCE_ORDER),
            (self._target, setting.target, far, TARGET_ORDER),
        ):
            order = Open(
                layout=layout,
                tokens=setting.tokens,
                order=None if setting.in_order else seed,
                copier=setting.copier,
                transports=names,
            )
            opened = _ask(pipe, order)
            assert isinstance(opened, Opened)
            self._endpoints |= opened.endpoints

    def transfer(self, transport: str, tokens: int, count: int, window: int = 1) -> Batch:
        """Make ``count`` transfers of ``tokens`` each, one part of the sequence after another."""
        setting = self._setting
        assert setting is not None
        near = transport == "loopback"
        first = next(self._numbers)
        for _ in range(count - 1):
            next(self._numbers)
        expect = Expect(
            transport=transport,
            wire=setting.wire,
            walk=setting.walk(tokens),
            first=first,
            count=count,
        )
        _ask(self._source if near else self._target, expect)
        used_before = self._cpu_s(near)
        sent = _ask(
            self._source,
            Send(
                transport=transport,
                endpoint=self._endpoints[transport],
                target=setting.source if near else setting.target,
                wire=setting.wire,
                walk=setting.walk(tokens),
                first=first,
                count=count,
                window=window,
            ),
        )
        assert isinstance(sent, Sent)
        return Batch(sent.latencies_s, sent.wall_s, self._cpu_s(near) - used_before)

    def load(self, folder: str, threads: int, tokens: int, transport: str) -> KvLayout:
        """Have the sender compute prompts of its own, see ``prefill``."""
        loaded = _ask(self._source, Load(folder=folder, threads=threads, tokens=tokens))
        assert isinstance(loaded, Loaded)
        order = Open(
            layout=loaded.layout,
            tokens=tokens,
            order=None,
            copier=Copier.BEST,
            transports=[transport],
        )
        opened = _ask(self._target, order)
        assert isinstance(opened, Opened)
        self._endpoints = opened.endpoints
        self._longest = tokens
        return loaded.layout

    def prefill(self, push: str, transport: str, wire: str, tokens: int) -> Prefilled:
        """Compute a prompt and send it."""
        number = next(self._numbers)
        expect = Expect(
            transport=transport,
            wire=wire,
            walk=Walk(tokens, self._longest, self._longest),
            first=number,
            count=1,
        )
        _ask(self._target, expect)
        order = Prefill(
            push=push,
            transport=transport,
            endpoint=self._endpoints[transport],
            tokens=tokens,
            number=number,
        )
        prefilled = _ask(self._source, order)
        assert isinstance(prefilled, Prefilled)
        return prefilled

    def copy_rate(self, tokens: int, seconds: float) -> float:
        """Both processes copy with digest at once, each as its side of such transfers has to; the
        slower one's bytes per second.
        """
        assert self._setting is not None
        walk = self._setting.walk(tokens)
        rates: list[float] = []

        def copy(pipe: Connection, copying: Copying) -> None:
            answer = _ask(pipe, Copy(copying=copying, walk=walk, seconds=seconds))
            assert isinstance(answer, Copied)
            rates.append(answer.bytes_per_s)

        sides = ((self._source, Copying.OUT), (self._target, Copying.IN))
        threads = [threading.Thread(target=copy, args=side) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return min(rates)

    def _cpu_s(self, near: bool) -> float:
        used = 0.0
        for pipe in [self._source] if near else [self._source, self._target]:
            answer = _ask(pipe, Usage())
            assert isinstance(answer, Used)
            used += answer.cpu_s
        return used


@contextmanager
def transfer_pair() -> Iterator[Pair]:
    """Start both processes; leaving ends them."""
    spawn = multiprocessing.get_context("spawn")
    secret = secrets.token_bytes(32)
    with ExitStack() as stack:
        pipes = []
        for name in ("source", "target"):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, secret), name=name)
            process.start()
            theirs.close()
            stack.callback(_end, process, ours)
            pipes.append(ours)
        yield Pair(*pipes)


def _ask(pipe: Connection, order: Order) -> Answer:
    """Raises StartupError when the process has died or hangs."""
    try:
        pipe.send_bytes(encode(order))
        if pipe.poll(ANSWER_TIMEOUT_S):
            return decode_answer(pipe.recv_bytes())
    except (EOFError, BrokenPipeError):
        raise StartupError("a process of the bench died; its last words are above") from None
    raise StartupError(f"a process of the bench did not answer in {ANSWER_TIMEOUT_S:.0f} s")


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join(END_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
