"""What a role under test talks to in place of a router."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.ids import Incarnation
from kvferry.proto import worker_pb2 as pb

ROUTER = Incarnation(5)


class NotingPort:
    """Keeps what a role says, cache events left out."""

    incarnation = ROUTER

    def __init__(self) -> None:
        self.sent: list[pb.WorkerMessage] = []

    def send(self, message: pb.WorkerMessage) -> None:
        if not message.HasField("cache_delta"):
            self.sent.append(message)

    def kinds(self) -> list[str]:
        return [message.WhichOneof("kind") or "" for message in self.sent]


def prompt_spec(prompt: Sequence[int], deadline_s: float = 60.0) -> pb.SequenceSpec:
    """A greedy request for nine tokens."""
    sampling = pb.Sampling(max_tokens=9, top_p=1.0, repetition_penalty=1.0)
    return pb.SequenceSpec(
        token_ids=prompt, prompt_len=len(prompt), deadline_s=deadline_s, sampling=sampling
    )
