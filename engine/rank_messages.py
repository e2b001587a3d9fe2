"""What rank 0 of a worker and its other ranks say to each other."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvferry.engine.plan import SamplingRows, StepPlan


class Message(msgspec.Struct, tag=True, frozen=True):
    """One frame."""


class Join(Message, frozen=True):
    """A rank is there. The first message it sends."""

    rank: int


class Welcome(Message, frozen=True):
    """Rank 0's answer: the worker's incarnation, which its links are bound to."""

    incarnation: int


class Put(Message, frozen=True):
    """A key of the store by which a process group is made."""

    key: str
    value: bytes


class Get(Message, frozen=True):
    """Asks for a key, once somebody has put it."""

    key: str


class Value(Message, frozen=True):
    """The answer to Get."""

    value: bytes


class Ready(Message, frozen=True):
    """A rank has loaded its part."""

    endpoints: tuple[str, ...]
    """Where it receives KV."""


class Step(Message, frozen=True):
    """A step to run: its number and arrays. Sampling is rank 0's alone."""

    step: int
    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    """Field of StepPlan -> (dtype, shape, bytes)."""


class Order(Message, frozen=True):
    """To the KV plane of a rank, in its own words."""

    payload: bytes


class Event(Message, frozen=True):
    """From the KV plane of a rank, in its own words."""

    payload: bytes


class Fault(Message, frozen=True):
    """A rank ends, and why. The last message it sends."""

    reason: str


class Stop(Message, frozen=True):
    """The worker ends."""


AnyMessage = Join | Welcome | Put | Get | Value | Ready | Step | Order | Event | Fault | Stop
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(frame)


def step_message(plan: StepPlan) -> Step:
    """What of a plan the other ranks need."""
    values = {name: getattr(plan, name) for name in StepPlan.__slots__}
    arrays = {
        name: (value.dtype.str, value.shape, value.tobytes())
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    }
    return Step(plan.step, arrays)


def plan_of(message: Step) -> StepPlan:
    """The plan with sampling that nobody reads."""
    arrays: dict[str, Any] = {
        name: np.frombuffer(data, dtype).reshape(shape).copy()  # torch takes none that is read-only
        for name, (dtype, shape, data) in message.arrays.items()
    }
    sampling = SamplingRows.greedy(len(arrays["sampled"]))
    return StepPlan(step=message.step, sampling=sampling, **arrays)
