"""The token that ends a prompt's last chunk, and how it is told to the router. Same for both
roles.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.request import FinishReason
from kvferry.engine.commit import logprob_message
from kvferry.engine.plan import RowLogprobs, StepResult
from kvferry.engine.ports import key_message
from kvferry.engine.sequences import WorkerSequence
from kvferry.engine.steps import Step
from kvferry.proto import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the last chunk of a prompt yields."""

    seq: WorkerSequence
    token_id: int
    finish_reason: FinishReason | None
    logprobs: RowLogprobs | None


def first_tokens(
    step: Step, result: StepResult, finished: dict[int, FinishReason], start: int = 0
) -> list[FirstToken]:
    """The first tokens among the sampled ones, which are those from index ``start`` on."""
    return [
        FirstToken(
            step.seqs[step.plan.sampled[i]],
            int(result.token_ids[i]),
            finished.get(i),
            result.logprobs.get(i),
        )
        for i in range(start, len(result.token_ids))
        if i not in result.invalid
    ]


def report_first_token(first: FirstToken, now_s: float) -> None:
    """Send PrefillDone."""
    seq = first.seq
    done = pb.PrefillDone(
        key=key_message(seq.key),
        token_id=first.token_id,
        logprob=logprob_message(first.logprobs) if first.logprobs else None,
        finish_reason=first.finish_reason or "",
        cached_tokens=seq.cached_tokens,
        wait_s=seq.started_s - seq.arrived_s,
        compute_s=now_s - seq.started_s,
    )
    seq.port.send(pb.WorkerMessage(prefill_done=done))
