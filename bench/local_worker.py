"""A worker of role ``both``, driven turn by turn on the caller's thread: no gRPC, router or Ray.

Everything between is the real thing: messages arrive encoded and are decoded, the step loop
receives, schedules, runs and commits, and what the session's writer would take from the outbox is
encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.core.config import Config, parse_config
from kvferry.core.ids import new_incarnation
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.backend import Backend
from kvferry.engine.outbox import Outbox
from kvferry.engine.ports import FromRouter, SessionOpened
from kvferry.proto import worker_pb2 as pb

DEADLINE_S = 3600.0


def colocated_config(
    threads: int,
    batch_tokens: int,
    batch_seqs: int,
    kv_memory: str = "512MiB",
    max_model_len: int | None = None,
) -> Config:
    """One worker that does all, with no KV plane to speak of."""
    return parse_config(
        {
            "model": {"max_model_len": max_model_len},
            "prefill": {"workers": 0},
            "decode": {
                "role": "both",
                "threads": threads,
                "max_batch_tokens": batch_tokens,
                "max_batch_seqs": batch_seqs,
                "reserve_queue": batch_seqs,
                "kv_memory": kv_memory,
            },
            "transfer": {"transport": "loopback", "staging": "1MiB", "slab": "256KiB"},
        }
    )


def sequence_spec(
    prompt: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()
) -> pb.SequenceSpec:
    """A greedy request that runs to ``max_tokens`` unless a stop token id comes up."""
    sampling = pb.Sampling(
        max_tokens=max_tokens,
        top_p=1.0,
        repetition_penalty=1.0,
        ignore_eos=True,
        stop_token_ids=stop_token_ids,
    )
    return pb.SequenceSpec(
        token_ids=prompt, prompt_len=len(prompt), sampling=sampling, deadline_s=DEADLINE_S
    )


class LocalRequest(NamedTuple):
    """What a router sends for one local request: Prefill after Reserve was granted."""

    number: int
    reserve: bytes
    prefill: bytes


class LocalWorker:
    """One router's view of one worker, without a network between them."""

    def __init__(self, config: Config, backend: Backend) -> None:
        self._worker = DecodeWorker("both-0", config, backend, secret="bench")
        self._outbox = Outbox(new_incarnation(), lambda: None)
        self._numbers = itertools.count(1)
        self._worker.loop.post(SessionOpened(self._outbox))
        self.turn()

    def close(self) -> None:
        self._worker.close_kv()

    def request(self, spec: pb.SequenceSpec) -> LocalRequest:
        """The encoded messages that a request takes. Nothing is sent."""
        number = next(self._numbers)
        key = pb.Key(request=number, attempt=1)
        reserve = pb.Reserve(key=key, sequence=spec, local=True)
        prefill = pb.Prefill(key=key, sequence=spec)
        return LocalRequest(
            number,
            pb.RouterMessage(reserve=reserve).SerializeToString(),
            pb.RouterMessage(prefill=prefill).SerializeToString(),
        )

    def receive(self, encoded: bytes) -> None:
        """What the session's reader does with one message."""
        message = pb.RouterMessage.FromString(encoded)
        self._worker.loop.post(FromRouter(self._outbox, message))

    def turn(self) -> list[pb.WorkerMessage]:
        """One round of the step loop. Returns what it said, after encoding it."""
        self._worker.loop.turn()
        said = list(self._drain())
        for message in said:
            message.SerializeToString()
        return said

    def _drain(self) -> Iterator[pb.WorkerMessage]:
        while (message := self._outbox.take()) is not None:
            yield message
