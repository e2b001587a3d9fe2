"""The prefill role.

    Prefill ─▶ WAITING ─first chunk─▶ PREFILLING ─first token─▶ TRANSFERRING ─acknowledged─▶ CLOSED

1. A prompt is taken with all its blocks, behind whatever prefix is cached, or answered Busy.
2. Its uncached tokens are computed in chunks; each block is findable as soon as it is full.
3. The first token is sampled here, and stop rules apply to it as to any other.
4. The KV that the decode side lacks goes to the sender, which ends in exactly one event; only
   then, and long before the request ends, do the blocks go back.

A request without a target (nothing follows its first token) closes at step 3.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.cache.hashing import chain_hashes
from kvferry.core.errors import ProtocolError
from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.engine.first_token import FirstToken, report_first_token
from kvferry.engine.plan import StepPlan, StepResult
from kvferry.engine.ports import RouterPort, send_failed
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.specs import spec_fault
from kvferry.kv_transfer.jobs import SendAborted, SendDone, SendFailed, SendJob
from kvferry.kv_transfer.plan import Span
from kvferry.kv_transfer.wire import block_table, layout_from_message
from kvferry.prefill_worker.admission import PromptAdmission
from kvferry.prefill_worker.batch import PrefillBatch
from kvferry.proto import worker_pb2 as pb


class Sender(Protocol):
    """The sending half of the KV plane; ``kv_transfer.sender.KvSender`` is the real one."""

    def send(self, job: SendJob) -> None: ...

    def abort(self, key: AttemptKey) -> None: ...


class PrefillRole:
    """State of all prompts on one prefill worker. Lives on the step loop's thread."""

    def __init__(
        self,
        sequences: Sequences,
        admission: PromptAdmission,
        batch: PrefillBatch,
        sender: Sender,
    ) -> None:
        self.sequences = sequences
        self.ports: dict[Incarnation, RouterPort] = {}
        self._admission = admission
        self._batch = batch
        self._sender = sender

    def receive(self, port: RouterPort, message: pb.RouterMessage) -> None:
        if message.WhichOneof("kind") != "prefill":
            return  # a prefill worker holds no reservations, so there is nothing to start
        prefill = message.prefill
        key = AttemptKey(port.incarnation, RequestId(prefill.key.request), prefill.key.attempt)
        if not self.sequences.supersede(key, self.end):
            return send_failed(port, key, "stale", "a later attempt is running")
        reason = self._admission.never_fits(len(prefill.sequence.token_ids)) or spec_fault(
            prefill.key, prefill.sequence, self.sequences.vocab_size
        )
        reason = reason or _target_fault(prefill)
        if reason is not None:
            return send_failed(port, key, "refused", reason)
        if not self._take(port, key, prefill):
            port.send(pb.WorkerMessage(busy=pb.Busy(key=prefill.key)))
        return None

    def transferred(self, event: object) -> None:
        assert isinstance(event, SendDone | SendFailed | SendAborted), event
        self.sequences.pool.lift(event.key)
        seq = self.sequences.get(event.key)
        if seq is None:
            return  # it was ended while the transfer ran
        self.sequences.close(seq)
        if not isinstance(event, SendDone):
            reason = event.reason if isinstance(event, SendFailed) else "aborted"
            send_failed(seq.port, event.key, "transfer", reason)

    def plan(self) -> StepPlan | None:
        return self._batch.plan()

    def commit(self, result: StepResult) -> None:
        for first in self._batch.commit(result):
            report_first_token(first, self.sequences.clock())
            self._hand_over(first)
        self._fail(self._batch.planned.invalid(result), "its logits are not finite")

    def fail_step(self, error: Exception) -> None:
        self._fail(self._batch.failed(), str(error))

    def end(self, seq: WorkerSequence) -> None:
        if seq.state is State.TRANSFERRING:
            # A pack may be reading its blocks: the sender's last word on it lifts the fence.
            self._sender.abort(seq.key)
            self.sequences.close(seq, fence=seq.key)
        else:
            self._batch.prompts.remove(seq)
            self.sequences.close(seq)

    def counts(self) -> tuple[int, int, int]:
        prompts = self._batch.prompts
        running = sum(seq.state is State.PREFILLING for seq in prompts)
        return running, len(prompts) - running, self._batch.waiting_tokens

    def _fail(self, seqs: list[WorkerSequence], message: str) -> None:
        for seq in seqs:
            self.end(seq)
            send_failed(seq.port, seq.key, "internal", message)

    def _take(self, port: RouterPort, key: AttemptKey, prefill: pb.Prefill) -> bool:
        if not self._admission.has_look_ahead(self._batch.waiting_tokens):
            return False
        seq = self.sequences.open(key, port, prefill.sequence)
        # The last position is always computed: without it there are no logits to sample from.
        cached = self.sequences.cached_blocks(seq, seq.length - 1)
        if not self.sequences.hold(seq, cached, reserved=False):
            self.sequences.close(seq)
            return False
        if prefill.HasField("target"):
            seq.target = prefill.target
        self._batch.prompts.append(seq)
        return True

    def _hand_over(self, first: FirstToken) -> None:
        seq, target = first.seq, first.seq.target
        ended = first.finish_reason is not None
        if ended or target is None or target.cached_tokens == seq.length:
            self.sequences.close(seq)
            return
        seq.enter(State.TRANSFERRING)
        self._sender.send(self._job(seq, target))

    def _job(self, seq: WorkerSequence, target: pb.Target) -> SendJob:
        layout = layout_from_message(target.layout)
        full = chain_hashes(self.sequences.root, seq.spec.token_ids, layout.block_size)
        return SendJob(
            key=seq.key,
            endpoint=target.endpoint,
            lease=LeaseId(target.lease),
            target=layout,
            tokens=Span(target.cached_tokens, seq.length),
            blocks=block_table(self.sequences.pool, seq.blocks),
            chain_hash=full[-1] if full else self.sequences.root,
        )


def _target_fault(prefill: pb.Prefill) -> str | None:
    """Why KV could not be sent where the router says, or None."""
    if not prefill.HasField("target"):
        return None
    cached, length = prefill.target.cached_tokens, len(prefill.sequence.token_ids)
    if cached > length:
        return f"target: {cached} tokens are cached, the sequence has {length}"
    try:
        layout_from_message(prefill.target.layout)
    except ProtocolError as error:
        return f"target: {error}"
    return None
