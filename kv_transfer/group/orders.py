"""What the KV plane of rank 0 tells those of the other ranks, and what they answer.

Every order carries which blocks changed hands since the last, so that each rank can tell, as rank 0
can, whether a block is still the one that a transfer was given.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId
from kvferry.kv_transfer.jobs import Account, Reason, ReceiveJob, SendJob


class Order(msgspec.Struct, tag=True, frozen=True):
    """To the KV plane of a rank."""


class Blocks(Order, frozen=True):
    """Generations that have changed."""

    block_ids: NDArray[np.int64]
    generations: NDArray[np.uint32]


class Begin(Order, frozen=True):
    """``KvSender.begin``, one job per rank of the receiver."""

    jobs: list[SendJob]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The part of a prompt that a step computes."""

    key: AttemptKey
    tokens_end: int
    """Tokens that are computed when the step is done."""
    cached_end: int = 0
    """Tokens that were there in all layers before its first step; 0: said already, or none."""


class Chunks(Order, frozen=True):
    """What the step to come computes of prompts that are being sent."""

    step: int
    chunks: list[Chunk]


class Computed(Order, frozen=True):
    """``KvSender.computed``, outside any step."""

    key: AttemptKey
    layers_end: int
    tokens_end: int


class Abort(Order, frozen=True):
    """``KvSender.abort``."""

    key: AttemptKey


class Probe(Order, frozen=True):
    """``KvSender.probe``."""

    peer: Incarnation
    rank: int
    endpoints: tuple[str, ...]


class Expect(Order, frozen=True):
    """``KvReceiver.expect``; ``Expected`` answers."""

    job: ReceiveJob


class Renew(Order, frozen=True):
    """``KvReceiver.renew``."""

    lease: LeaseId
    deadline_s: float


class Release(Order, frozen=True):
    """``KvReceiver.release``."""

    lease: LeaseId


class Answer(msgspec.Struct, tag=True, frozen=True):
    """From the KV plane of a rank."""


class Expected(Answer, frozen=True):
    """A lease is registered: slabs for it may come."""

    lease: LeaseId


class Done(Answer, frozen=True):
    """The last word on a transfer that went through."""

    key: AttemptKey
    account: Account
    lease: LeaseId = LeaseId(0)
    """Of a receiver."""


class Failed(Answer, frozen=True):
    """The last word on one that did not."""

    key: AttemptKey
    reason: Reason
    detail: str = ""
    lease: LeaseId = LeaseId(0)


class GivenUp(Answer, frozen=True):
    """The last word on one that was aborted or released."""

    key: AttemptKey
    lease: LeaseId = LeaseId(0)


class Counts(Answer, frozen=True):
    """All that a receiver has counted so far."""

    dropped: dict[str, int]
    tallies: dict[str, int]


AnyOrder = Blocks | Begin | Chunks | Computed | Abort | Probe | Expect | Renew | Release
AnyAnswer = Expected | Done | Failed | GivenUp | Counts


def _encoded_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    raise TypeError(f"{type(value).__name__} is not sent to ranks")


def _decoded_array(kind: Any, value: Any) -> Any:
    return np.frombuffer(value[1], value[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded_array)
_orders: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(
    AnyOrder, dec_hook=_decoded_array
)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


def encode(message: Order | Answer) -> bytes:
    return _encoder.encode(message)


def decode_order(payload: bytes) -> AnyOrder:
    """Raises msgspec.DecodeError."""
    return _orders.decode(payload)


def decode_answer(payload: bytes) -> AnyAnswer:
    """Raises msgspec.DecodeError."""
    return _answers.decode(payload)
