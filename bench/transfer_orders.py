"""What the transfer bench tells its processes to do, and what they answer: tagged JSON."""

from __future__ import annotations

import msgspec

from kvferry.bench.transfer_cache import Copier, Walk
from kvferry.bench.transfer_copy import Copying
from kvferry.kv_transfer.layout import KvLayout


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Open(Message, frozen=True):
    """Make a cache, and a receiver on it for each transport; ends what an earlier Open made."""

    layout: KvLayout
    tokens: int
    order: int | None
    """Seed of the order in which the blocks stand; None: one after the other."""
    copier: Copier
    transports: list[str]


class Opened(Message, frozen=True):
    endpoints: dict[str, str]


class Expect(Message, frozen=True):
    """Register leases [first, first + count)."""

    transport: str
    wire: str
    walk: Walk
    first: int
    count: int


class Send(Message, frozen=True):
    """Make transfers to leases [first, first + count), at most ``window`` at once."""

    transport: str
    endpoint: str
    target: KvLayout
    wire: str
    walk: Walk
    first: int
    count: int
    window: int


class Sent(Message, frozen=True):
    latencies_s: list[float]
    """From the order to send to the last acknowledgement, of each."""
    wall_s: float


class Copy(Message, frozen=True):
    """Copy with digest what transfers would move, for so long: see ``Copies``."""

    copying: Copying
    walk: Walk
    seconds: float


class Copied(Message, frozen=True):
    bytes_per_s: float


class Load(Message, frozen=True):
    """Make the cache of a model instead, for prompts of up to so many tokens."""

    folder: str
    threads: int
    tokens: int


class Loaded(Message, frozen=True):
    layout: KvLayout


class Prefill(Message, frozen=True):
    """Compute a prompt and send its KV to a lease, with the KV plane told of each layer."""

    push: str
    transport: str
    endpoint: str
    tokens: int
    number: int


class Prefilled(Message, frozen=True):
    compute_s: float
    total_s: float
    """From the beginning to the last acknowledgement."""
    exposed_s: float
    """The part of the transfer after all was computed."""
    wall_s: float
    """From the first slab that stood ready to the last acknowledgement."""


class Usage(Message, frozen=True):
    """How much processor time has been used?"""


class Used(Message, frozen=True):
    cpu_s: float


class Done(Message, frozen=True):
    pass


Order = Open | Expect | Send | Copy | Usage | Load | Prefill
Answer = Opened | Sent | Copied | Used | Done | Loaded | Prefilled

encode = msgspec.json.encode
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def decode_order(frame: bytes) -> Order:
    return _orders.decode(frame)


def decode_answer(frame: bytes) -> Answer:
    return _answers.decode(frame)
