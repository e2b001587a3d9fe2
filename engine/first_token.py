"""The token that ends a prompt's last chunk, and how it is told to the router. Same for both
roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from kvferry.core.request import FinishReason
from kvferry.engine.commit import logprob_message
from kvferry.engine.plan import RowLogprobs, StepResult
from kvferry.engine.ports import key_message
from kvferry.engine.sequences import WorkerSequence
from kvferry.engine.steps import Step
from kvferry.proto import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Sample:
    """One token that may follow a prompt."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: RowLogprobs | None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the last chunk of a prompt yields."""

    seq: WorkerSequence
    samples: tuple[Sample, ...]
    """Of its own sample index and those that follow."""

    @property
    def token_id(self) -> int:
        """Of its own."""
        return self.samples[0].token_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of its own."""
        return self.samples[0].finish_reason


def first_tokens(
    step: Step, result: StepResult, finished: dict[int, FinishReason], start: int = 0
) -> list[FirstToken]:
    """The first tokens among the sampled ones, which are those from index ``start`` on."""
    sampled = step.plan.sampled
    groups = groupby(range(start, len(result.token_ids)), key=sampled.__getitem__)
    firsts = []
    for number, group in groups:
        indexes = list(group)
        if not any(i in result.invalid for i in indexes):
            samples = (
                Sample(int(result.token_ids[i]), finished.get(i), result.logprobs.get(i))
                for i in indexes
            )
            firsts.append(FirstToken(step.seqs[number], tuple(samples)))
    return firsts


def report_first_token(first: FirstToken, now_s: float) -> None:
    """Send PrefillDone."""
    seq = first.seq
    own, *more = map(_message, first.samples)
    done = pb.PrefillDone(
        key=key_message(seq.key),
        token_id=own.token_id,
        logprob=own.logprob if own.HasField("logprob") else None,
        finish_reason=own.finish_reason,
        more=more,
        cached_tokens=seq.cached_tokens,
        wait_s=seq.started_s - seq.arrived_s,
        compute_s=now_s - seq.started_s,
    )
    seq.port.send(pb.WorkerMessage(prefill_done=done))


def _message(sample: Sample) -> pb.FirstToken:
    return pb.FirstToken(
        token_id=sample.token_id,
        logprob=logprob_message(sample.logprobs) if sample.logprobs else None,
        finish_reason=sample.finish_reason or "",
    )
