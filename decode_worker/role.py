"""The decode role.

    Reserve ─▶ WAITING ──ledger admits─▶ RESERVED ──KV verified and Start─▶ DECODING ──▶ CLOSED
                                            └──Prefill (local)─▶ PREFILLING ──first token──┘
                          blocks run out: DECODING or PREFILLING ◀─▶ SWAPPED, or back to the router

1. A reservation waits in a bounded queue until the ledger has room, or is refused at once.
2. Granted, it holds a reference on every block that is cached and a lease on the rest.
3. KV arrives through the receiver; nothing is computed from it before all of it is verified.
4. First token and KV may come in either order; with both it joins the running batch.
5. Each step computes one token of every running sequence and, behind them, chunks of local prompts.
6. When a sequence finds no block for its next token, the newest requests make room: their KV moves
   to host memory, or, where that is full, they go back to their router, each at most once. Swapped
   ones come back before anybody new comes in, the oldest first.

With role ``both`` the router sends Prefill here as well: same life, no transfer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.decode_worker.admission import Admission, Ledger
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.engine.emit import emit_tokens
from kvferry.engine.first_token import FirstToken, report_first_token
from kvferry.engine.loop import TransferCounts
from kvferry.engine.plan import StepPlan, StepResult
from kvferry.engine.ports import Gate, Relief, RouterPort, key_message, send_failed
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.specs import spec_fault
from kvferry.engine.swaps import Swapper
from kvferry.kv_transfer.jobs import ReceiveClosed, ReceiveDone, ReceiveFailed, ReceiveJob
from kvferry.kv_transfer.wire import account_message, block_table, ending_of, failure_text
from kvferry.proto import worker_pb2 as pb


class Receiver(Protocol):
    """The receiving half of the KV plane; ``kv_transfer.group.receiver`` has the real one."""

    def expect(self, job: ReceiveJob, ready: Callable[[], None]) -> None:
        """``ready`` is called, on some thread, once slabs may come."""
        ...

    def renew(self, lease: LeaseId, deadline_s: float) -> None: ...

    def release(self, lease: LeaseId) -> None: ...

    @property
    def counters(self) -> Mapping[str, int]: ...

    @property
    def tallies(self) -> Mapping[str, int]: ...


class DecodeRole:
    """State of all sequences on one decode worker. Lives on the step loop's thread."""

    apart = frozenset({"reserve", "prefill", "start"})

    def __init__(
        self,
        sequences: Sequences,
        ledger: Ledger,
        batch: DecodeBatch,
        receiver: Receiver,
        gate: Gate,
        reserve_queue: int,
        wire: str,
        num_host_slots: int = 0,
    ) -> None:
        """``wire``: element type that KV from outside has on its way. ``num_host_slots``: blocks
        that host memory holds.
        """
        self.sequences = sequences
        self.ports: dict[Incarnation, RouterPort] = {}
        self._ledger = ledger
        self._batch = batch
        self._receiver = receiver
        self._gate = gate
        self._reserve_queue = reserve_queue
        self._wire = wire
        self.endings: Counter[str] = Counter()
        """Leases so far, by how they ended."""
        swapper = Swapper(sequences, num_host_slots)
        self._admission = Admission(
            sequences, ledger, batch, gate, swapper, self._give_back, self._refuse
        )
        self._leases = itertools.count(1)

    def receive(self, port: RouterPort, message: pb.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "reserve":
            self._reserve(port, message.reserve)
        elif kind == "start":
            self._start(port, message.start)
        elif kind == "prefill":
            self._prefill(port, message.prefill)

    def transferred(self, event: object) -> None:
        assert isinstance(event, ReceiveDone | ReceiveFailed | ReceiveClosed), event
        self.endings[ending_of(event)] += 1
        self.sequences.pool.lift(event.key)
        seq = self.sequences.get(event.key)
        if seq is None or seq.lease != event.lease:
            return  # it was ended while the transfer ran
        if isinstance(event, ReceiveDone):
            seq.received = account_message(event.account)
            self._verified(seq)
            self._begin(seq)
        else:
            self.sequences.close(seq)
            send_failed(seq.port, seq.key, "transfer", failure_text(event))

    def plan(self) -> StepPlan | None:
        if self._gate.shut:
            for seq in [s for s in self.sequences if s.state is State.RESERVED]:
                self._begin(seq)  # a gate may have opened since
        for seq in self._admission.turn():
            self._grant(seq)
        swaps = self._admission.swapper
        plan = self._batch.plan(moves=swaps.has_moves)
        if plan is not None:
            swaps.add_moves(plan)
        return plan

    def plan_ahead(self) -> StepPlan | None:
        return self._batch.plan_ahead()

    def layer_listener(self) -> None:
        """What is computed here stays here."""

    def commit(self, result: StepResult) -> None:
        self._admission.swapper.settle()
        tokens, firsts = self._batch.commit(result)
        if tokens.rows.size:
            emit_tokens(
                self.sequences.table,
                self.ports,
                tokens.rows,
                tokens.token_ids,
                tokens.finished,
                tokens.logprobs,
            )
        for i in tokens.finished:
            self.end(self.sequences.by_row[int(tokens.rows[i])])
        for first in firsts:
            self._first_token(first)
        self._fail(self._batch.planned.invalid(result), "its logits are not finite")

    def fail_step(self, error: Exception) -> None:
        for seq in self._admission.swapper.failed():
            self._give_back(seq)
        self._fail(self._batch.failed(), str(error))

    def renewed(self, seqs: list[WorkerSequence]) -> None:
        for seq in seqs:
            if seq.state is State.RESERVED and not seq.verified:
                self._receiver.renew(seq.lease, seq.ends_s)

    def end(self, seq: WorkerSequence) -> None:
        match seq.state:
            case State.WAITING:
                self._admission.drop(seq)
                self.sequences.close(seq)
            case State.RESERVED if not seq.verified:
                # A scatter may be writing its blocks: the receiver's last word lifts the fence.
                self._receiver.release(seq.lease)
                self.sequences.close(seq, fence=seq.key)
            case State.RESERVED:
                self.sequences.close(seq)
            case State.SWAPPED:
                self._admission.swapper.discard(seq)
                self.sequences.close(seq)
            case _:
                self._batch.discard(seq)
                self.sequences.close(seq)

    def counts(self) -> tuple[int, int, int]:
        running = len(self._batch.running) + len(self._batch.prompts)
        return running, self._admission.num_waiting, self._batch.waiting_tokens

    @property
    def preemptions(self) -> Mapping[Relief, int]:
        """Sequences that had to go so far."""
        return self._admission.preemptions

    @property
    def num_free_slots(self) -> int:
        """Host slots that nobody waits in."""
        return self._admission.swapper.num_free

    def transfer_counts(self) -> TransferCounts:
        return {
            "dropped": self._receiver.counters,
            "endings": dict(self.endings),
            "link_events": self._receiver.tallies,
            "preemptions": {str(k): n for k, n in dict(self._admission.preemptions).items()},
        }

    def _fail(self, seqs: list[WorkerSequence], message: str) -> None:
        for seq in seqs:
            self.end(seq)
            send_failed(seq.port, seq.key, "internal", message)

    def _reserve(self, port: RouterPort, reserve: pb.Reserve) -> None:
        key = AttemptKey(port.incarnation, RequestId(reserve.key.request), reserve.key.attempt)
        if not self.sequences.supersede(key, self.end):
            return send_failed(port, key, "stale", "a later attempt is running")
        reason = self._ledger.never_fits(len(reserve.sequence.token_ids)) or spec_fault(
            reserve.key, reserve.sequence, self.sequences.vocab_size
        )
        if reason is None and reserve.HasField("fork_of"):
            return self._reserve_fork(port, key, reserve)
        full = len(self._admission.waiting) >= self._reserve_queue
        if reason is not None or full:
            refused = pb.Refused(
                key=reserve.key, reason=reason or "reservation queue is full", never=bool(reason)
            )
            port.send(pb.WorkerMessage(refused=refused))
            return None
        seq = self.sequences.open(key, port, reserve.sequence)
        seq.local = reserve.local
        self._admission.waiting.append(seq)
        return None

    def _reserve_fork(self, port: RouterPort, key: AttemptKey, reserve: pb.Reserve) -> None:
        """It waits for its parent's KV, not in the queue for blocks."""
        of = reserve.fork_of
        parent = self.sequences.get(AttemptKey(key.router, RequestId(of.request), of.attempt))
        if parent is None or parent.spec.token_ids != reserve.sequence.token_ids:
            refused = pb.Refused(key=reserve.key, reason="there is no such prompt to fork from")
            port.send(pb.WorkerMessage(refused=refused))
            return
        seq = self.sequences.open(key, port, reserve.sequence)
        seq.parent = parent
        self._admission.forks.append(seq)

    def _refuse(self, seq: WorkerSequence, reason: str) -> None:
        self.end(seq)
        refused = pb.Refused(key=key_message(seq.key), reason=reason)
        seq.port.send(pb.WorkerMessage(refused=refused))

    def _give_back(self, seq: WorkerSequence) -> None:
        self._admission.preemptions[Relief.GIVE_BACK] += 1
        self.end(seq)
        preempted = pb.Preempted(key=key_message(seq.key))
        seq.port.send(pb.WorkerMessage(preempted=preempted))

    def _grant(self, seq: WorkerSequence) -> None:
        seq.enter(State.RESERVED)
        seq.lease = LeaseId(next(self._leases))
        granted = pb.Granted(
            key=key_message(seq.key), lease=seq.lease, cached_tokens=seq.cached_tokens
        )
        message = pb.WorkerMessage(granted=granted)
        if seq.local or seq.cached_tokens == seq.length:
            self._verified(seq)
            seq.port.send(message)
        else:
            self._receiver.expect(self._job(seq), lambda: seq.port.send(message))

    def _job(self, seq: WorkerSequence) -> ReceiveJob:
        return ReceiveJob(
            key=seq.key,
            lease=seq.lease,
            wire=self._wire,
            tokens=Span(seq.cached_tokens, seq.length),
            blocks=block_table(self.sequences.pool, seq.blocks),
            deadline_s=seq.ends_s,
            chain_hash=seq.hashes[-1] if seq.hashes else self.sequences.root,
        )

    def _verified(self, seq: WorkerSequence) -> None:
        """Its blocks stop being reserved: they hold its KV, or will be computed here."""
        seq.verified = True
        self.sequences.fill_reserved(seq)
        if not seq.local:
            self.sequences.table.computed[seq.row] = seq.length
            self.sequences.publish(seq, seq.length)

    def _start(self, port: RouterPort, start: pb.Start) -> None:
        key = AttemptKey(port.incarnation, RequestId(start.key.request), start.key.attempt)
        seq = self.sequences.get(key)
        if seq is None or seq.state is not State.RESERVED or seq.local:
            return
        if start.token_id >= self.sequences.vocab_size:
            self._fail([seq], f"first token {start.token_id} is not in the vocabulary")
            return
        seq.first_token = start.token_id
        seq.started_s = self.sequences.clock()
        self._begin(seq)

    def _begin(self, seq: WorkerSequence) -> None:
        """Into the running batch, once first token and KV are both here."""
        if not seq.verified or seq.first_token is None:
            return
        if self._gate.shut and self._gate.holds(seq.state, seq.key):
            return
        self.sequences.table.append_one(seq.row, seq.first_token)
        seq.enter(State.DECODING)
        self._batch.join(seq)
        ready = pb.DecodeReady(
            key=key_message(seq.key),
            account=seq.received,
            exposed_s=self.sequences.clock() - seq.started_s,
        )
        seq.port.send(pb.WorkerMessage(decode_ready=ready))

    def _prefill(self, port: RouterPort, prefill: pb.Prefill) -> None:
        key = AttemptKey(port.incarnation, RequestId(prefill.key.request), prefill.key.attempt)
        seq = self.sequences.get(key)
        if seq is None or seq.state is not State.RESERVED or not seq.local:
            return send_failed(port, key, "stale", "no local reservation")
        seq.enter(State.PREFILLING)
        self._batch.prompts.append(seq)
        return None

    def _first_token(self, first: FirstToken) -> None:
        seq = first.seq
        report_first_token(first, self.sequences.clock())
        if first.finish_reason is not None:
            self.sequences.close(seq)
            return
        seq.enter(State.DECODING)
        self._batch.join(seq)
