"""The prefill role.

    Prefill ─▶ WAITING ─first chunk─▶ PREFILLING ─first token─▶ TRANSFERRING ─acknowledged─▶ CLOSED
                                          └─ KV to the sender, layer by layer ─┘

1. A prompt is taken with all its blocks, behind whatever prefix is cached, or answered Busy. It
   takes its place by deadline and by what is left of it: engine/prompt_order.py.
2. Its uncached tokens are computed in chunks; each block is findable as soon as it is full.
3. From its first chunk on, the sender hears of each layer that is done and may ship the KV that the
   decode side lacks while later layers compute.
4. The first token is sampled here, and stop rules apply to it as to any other.
5. TRANSFERRING waits for what is not acknowledged yet. The sender ends in exactly one event; only
   then, and long before the request ends, do the blocks go back.

A request without a target (nothing follows its first token) closes at step 4. Whatever else ends a
prompt before all was delivered aborts its transfer, and fences its blocks until the sender's last
word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvferry.core.errors import ProtocolError, TransferFailed
from kvferry.core.ids import AttemptKey, Incarnation, RequestId
from kvferry.engine.first_token import FirstToken, report_first_token
from kvferry.engine.loop import TransferCounts
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.ports import RouterPort, key_message, send_failed
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.specs import spec_fault
from kvferry.kv_transfer.group.orders import Chunk
from kvferry.kv_transfer.jobs import SendAborted, SendDone, SendFailed, SendJob
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.peer_book import PeerBook, Probe
from kvferry.kv_transfer.plan import check_compatible, wire_dtype
from kvferry.kv_transfer.prober import Probed
from kvferry.kv_transfer.wire import (
    account_message,
    block_table,
    ending_of,
    endpoints_of,
    failure_text,
    layout_from_message,
    send_jobs,
)
from kvferry.prefill_worker.admission import PromptAdmission
from kvferry.prefill_worker.batch import PrefillBatch
from kvferry.proto import worker_pb2 as pb


class Sender(Protocol):
    """The sending half of the KV plane; ``kv_transfer.group.sender`` has the real one."""

    def begin(self, jobs: Sequence[SendJob]) -> None:
        """Blocks are held; what of them is computed follows. One job per rank of the receiver."""
        ...

    def follow(self, step: int, chunks: Sequence[Chunk]) -> LayerDone:
        """Who has to hear of the layers of a step, for it to send these chunks as they are done."""
        ...

    def computed(self, key: AttemptKey, layers_end: int, tokens_end: int) -> None:
        """Tokens before ``tokens_end`` are in the cache in layers before ``layers_end``. Legal
        after the end.
        """
        ...

    def abort(self, key: AttemptKey) -> None: ...


class PrefillRole:
    """State of all prompts on one prefill worker. Lives on the step loop's thread."""

    apart: frozenset[str] = frozenset()
    """None: whether there is room for one more prompt depends on what the running step computes."""

    def __init__(
        self,
        sequences: Sequences,
        admission: PromptAdmission,
        batch: PrefillBatch,
        sender: Sender,
        layout: KvLayout,
        probe: Probe | None = None,
    ) -> None:
        """``probe``: measures the ways to a peer; None: nobody does."""
        self.sequences = sequences
        self.ports: dict[Incarnation, RouterPort] = {}
        self.endings: Counter[str] = Counter()
        """Transfers so far, by how they ended."""
        self._admission = admission
        self._batch = batch
        self._sender = sender
        self._layout = layout
        self._peers = PeerBook(probe)
        self._chunks: list[Chunk] = []
        """Of the step planned last, those whose KV goes out."""

    def receive(self, port: RouterPort, message: pb.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "prefill":
            self._prefill(port, message.prefill)
        elif kind == "peers":
            for links in self._peers.update(port.incarnation, message.peers, self.ports):
                port.send(pb.WorkerMessage(links=links))

    def probed(self, probed: Probed) -> None:
        """The ways to a peer were measured."""
        links = self._peers.probed(probed)
        if links is not None:
            for port in self.ports.values():
                port.send(pb.WorkerMessage(links=links))

    def transferred(self, event: object) -> None:
        assert isinstance(event, SendDone | SendFailed | SendAborted), event
        self.endings[ending_of(event)] += 1
        self.sequences.pool.lift(event.key)
        seq = self.sequences.get(event.key)
        if seq is None:
            return  # it was ended while the transfer ran
        seq.sending = False
        if isinstance(event, SendDone):
            seq.sent = account_message(event.account)
            if seq.state is State.TRANSFERRING:
                self._delivered(seq)
            return
        self.end(seq)
        send_failed(seq.port, event.key, "transfer", failure_text(event))

    def plan(self) -> StepPlan | None:
        plan = self._batch.plan()
        if plan is None:
            return None
        ends = (plan.context_lens + plan.query_lens).tolist()
        chunks = zip(self._batch.planned.seqs, ends, strict=True)
        going = [(seq, end, self._begin_sending(seq)) for seq, end in chunks if _goes_out(seq)]
        self._chunks = [Chunk(seq.key, end, cached) for seq, end, cached in going if seq.sending]
        return plan

    def plan_ahead(self) -> None:
        """Which prompts come next depends on those that come in until then."""

    def layer_listener(self) -> LayerDone | None:
        return (
            self._sender.follow(self._batch.planned.plan.step, self._chunks)
            if self._chunks
            else None
        )

    def commit(self, result: StepResult) -> None:
        for first in self._batch.commit(result):
            report_first_token(first, self.sequences.clock())
            self._hand_over(first)
        self._fail(self._batch.planned.invalid(result), "its logits are not finite")

    def fail_step(self, error: Exception) -> None:
        self._fail(self._batch.failed(), str(error))

    def renewed(self, seqs: list[WorkerSequence]) -> None:
        """A transfer ends with its sequence, here: the sender keeps no deadline of its own."""

    def end(self, seq: WorkerSequence) -> None:
        if seq.state is not State.TRANSFERRING:
            self._batch.prompts.remove(seq)
        self._close(seq)

    def counts(self) -> tuple[int, int, int]:
        prompts = self._batch.prompts
        running = sum(seq.state is State.PREFILLING for seq in prompts)
        return running, len(prompts) - running, self._batch.waiting_tokens

    def transfer_counts(self) -> TransferCounts:
        return {"dropped": {}, "endings": dict(self.endings), "link_events": {}, "preemptions": {}}

    def _prefill(self, port: RouterPort, prefill: pb.Prefill) -> None:
        key = AttemptKey(port.incarnation, RequestId(prefill.key.request), prefill.key.attempt)
        if not self.sequences.supersede(key, self.end):
            return send_failed(port, key, "stale", "a later attempt is running")
        reason = self._admission.never_fits(len(prefill.sequence.token_ids)) or spec_fault(
            prefill.key, prefill.sequence, self.sequences.vocab_size
        )
        reason = reason or _target_fault(prefill, self._layout)
        if reason is not None:
            return send_failed(port, key, "refused", reason)
        if not self._take(port, key, prefill):
            port.send(pb.WorkerMessage(busy=pb.Busy(key=prefill.key)))
        return None

    def _fail(self, seqs: list[WorkerSequence], message: str) -> None:
        for seq in seqs:
            self.end(seq)
            send_failed(seq.port, seq.key, "internal", message)

    def _take(self, port: RouterPort, key: AttemptKey, prefill: pb.Prefill) -> bool:
        spec = prefill.sequence
        before = self._batch.tokens_before(len(spec.token_ids), spec.deadline_s)
        if not self._admission.has_look_ahead(before):
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

    def _begin_sending(self, seq: WorkerSequence) -> int:
        """With its first chunk. The tokens of it that were there before and are to be sent."""
        if seq.sending or seq.sent is not None:
            return 0
        assert seq.target is not None
        blocks = block_table(self.sequences.pool, seq.blocks)
        self._sender.begin(send_jobs(seq.key, seq.target, seq.spec.token_ids, blocks))
        seq.sending = True
        return seq.cached_tokens if seq.cached_tokens > seq.target.cached_tokens else 0

    def _hand_over(self, first: FirstToken) -> None:
        seq = first.seq
        if seq.sending or seq.sent is not None:
            # Said a second time: the step has ended too.
            self._sender.computed(seq.key, self._layout.num_layers, seq.length)
        if seq.sending and first.finish_reason is None:
            seq.enter(State.TRANSFERRING)
        elif seq.sent is not None:
            self._delivered(seq)
        else:
            self._close(seq)

    def _delivered(self, seq: WorkerSequence) -> None:
        sent = pb.Sent(key=key_message(seq.key), account=seq.sent)
        seq.port.send(pb.WorkerMessage(sent=sent))
        self._close(seq)

    def _close(self, seq: WorkerSequence) -> None:
        if not seq.sending:
            self.sequences.close(seq)
            return
        # A pack may be reading its blocks: the sender's last word on it lifts the fence.
        self._sender.abort(seq.key)
        self.sequences.close(seq, fence=seq.key)


def _goes_out(seq: WorkerSequence) -> bool:
    """Whether another worker waits for KV of it."""
    return seq.target is not None and seq.target.cached_tokens < seq.length


def _target_fault(prefill: pb.Prefill, source: KvLayout) -> str | None:
    """Why KV could not be sent where the router says, or None."""
    if not prefill.HasField("target"):
        return None
    target, length = prefill.target, len(prefill.sequence.token_ids)
    if target.cached_tokens > length:
        return f"target: {target.cached_tokens} tokens are cached, the sequence has {length}"
    if not target.wire:
        return "target: it names no element type"
    try:
        layout = layout_from_message(target.layout)
        for rank in range(layout.num_ranks):
            if not endpoints_of(target.endpoints, rank):
                return f"target: its rank {rank} has no endpoint"
        check_compatible(source, layout)
        wire_dtype(source, layout, target.wire)
    except (ProtocolError, TransferFailed) as error:
        return f"target: {error}"
    return None
