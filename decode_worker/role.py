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
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kvferry.core.ids import AttemptKey, BlockId, Incarnation, LeaseId, RequestId
from kvferry.decode_worker.admission import Ledger
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.engine.emit import emit_tokens
from kvferry.engine.first_token import FirstToken, report_first_token
from kvferry.engine.loop import TransferCounts
from kvferry.engine.plan import StepPlan, StepResult
from kvferry.engine.ports import Gate, Relief, RouterPort, key_message, send_failed
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.specs import spec_fault
from kvferry.engine.swaps import Swapper
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.jobs import Reason, ReceiveClosed, ReceiveDone, ReceiveFailed, ReceiveJob
from kvferry.kv_transfer.layout import Span
from kvferry.kv_transfer.wire import account_message, block_table, ending_of, failure_text
from kvferry.proto import worker_pb2 as pb


class Receiver(Protocol):
    """The receiving half of the KV plane; ``kv_transfer.receiver.KvReceiver`` is the real one."""

    def expect(self, job: ReceiveJob) -> None: ...

    def renew(self, lease: LeaseId, deadline_s: float) -> None: ...

    def release(self, lease: LeaseId) -> None: ...

    @property
    def counters(self) -> Mapping[Reason, int]: ...

    @property
    def tallies(self) -> Mapping[Tally, int]: ...


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
        self.preemptions: Counter[Relief] = Counter()
        self._swapper = Swapper(sequences, num_host_slots)
        self._waiting: deque[WorkerSequence] = deque()
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
        num_preempted = self.preemptions.total()
        if self._gate.shut:
            self._ask_gate()
        self._make_room()
        if self.preemptions.total() == num_preempted:
            self._resume()  # else what was freed is for those that others had to go for
        plan = self._batch.plan(moves=self._swapper.has_moves)
        if plan is not None:
            self._swapper.add_moves(plan)
        return plan

    def layer_listener(self) -> None:
        """What is computed here stays here."""

    def commit(self, result: StepResult) -> None:
        self._swapper.settle()
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
        for seq in self._swapper.failed():
            self._give_back(seq)
        self._fail(self._batch.failed(), str(error))

    def renewed(self, seqs: list[WorkerSequence]) -> None:
        for seq in seqs:
            if seq.state is State.RESERVED and not seq.verified:
                self._receiver.renew(seq.lease, seq.ends_s)

    def end(self, seq: WorkerSequence) -> None:
        match seq.state:
            case State.WAITING:
                self._waiting.remove(seq)
                self.sequences.close(seq)
            case State.RESERVED if not seq.verified:
                # A scatter may be writing its blocks: the receiver's last word lifts the fence.
                self._receiver.release(seq.lease)
                self.sequences.close(seq, fence=seq.key)
            case State.RESERVED:
                self.sequences.close(seq)
            case State.SWAPPED:
                self._swapper.discard(seq)
                self.sequences.close(seq)
            case _:
                self._batch.discard(seq)
                self.sequences.close(seq)

    def counts(self) -> tuple[int, int, int]:
        running = len(self._batch.running) + len(self._batch.prompts)
        waiting = len(self._waiting) + len(self._swapper.swapped)
        return running, waiting, self._batch.waiting_tokens

    @property
    def num_free_slots(self) -> int:
        """Host slots that nobody waits in."""
        return self._swapper.num_free

    def transfer_counts(self) -> TransferCounts:
        dropped = {str(reason): count for reason, count in self._receiver.counters.items()}
        events = {str(what): count for what, count in self._receiver.tallies.items()}
        return {"dropped": dropped, "endings": dict(self.endings), "link_events": events}

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
        full = len(self._waiting) >= self._reserve_queue
        if reason is not None or full:
            refused = pb.Refused(
                key=reserve.key, reason=reason or "reservation queue is full", never=bool(reason)
            )
            port.send(pb.WorkerMessage(refused=refused))
            return None
        seq = self.sequences.open(key, port, reserve.sequence)
        seq.local = reserve.local
        self._waiting.append(seq)
        return None

    def _ask_gate(self) -> None:
        """A gate may have opened since, or want blocks to run out now."""
        for seq in [s for s in self.sequences if s.state is State.RESERVED]:
            self._begin(seq)
        length = self.sequences.table.length
        for seq in [*self._batch.running, *self._batch.prompts]:
            relief = self._gate.preempts(seq.key, int(length[seq.row]))
            if relief is not None:
                self._preempt(seq, relief)

    def _make_room(self) -> None:
        """Give running sequences blocks to go on with, be it those of others."""
        while chosen := self._batch.grow():
            for seq in chosen:
                self._preempt(seq, Relief.SWAP)
        stuck = self._batch.stuck()
        if stuck is not None and not self._blocks_will_come():
            self._give_back(stuck)  # nobody else holds any: it can never fit

    def _blocks_will_come(self) -> bool:
        """Whether a fence will be lifted, or a reservation come to something."""
        num_holders = len(self.sequences.held_rows())
        in_batch = len(self._batch.running) + len(self._batch.prompts)
        return self.sequences.pool.num_fences > 0 or num_holders > in_batch

    def _preempt(self, seq: WorkerSequence, relief: Relief) -> None:
        self._batch.discard(seq)
        if relief is Relief.SWAP and self._swapper.swap_out(seq):
            self.preemptions[Relief.SWAP] += 1
        else:
            self._batch.join(seq)
            self._give_back(seq)

    def _give_back(self, seq: WorkerSequence) -> None:
        self.preemptions[Relief.GIVE_BACK] += 1
        self.end(seq)
        preempted = pb.Preempted(key=key_message(seq.key))
        seq.port.send(pb.WorkerMessage(preempted=preempted))

    def _resume(self) -> None:
        """Let in those who wait while the ledger has room for the first: swapped ones by age, then
        reservations by arrival.
        """
        table = self.sequences.table
        while self._swapper.swapped:
            seq = self._swapper.swapped[0]
            if self._gate.shut and self._gate.holds(seq.state, seq.key):
                return
            cached = self._swapper.cached_blocks(seq)
            length, most = int(table.length[seq.row]), int(table.max_length[seq.row])
            if not self._has_room(seq, cached, length, most):
                return
            if not self._swapper.swap_in(seq, cached):
                return
            self._batch.join(seq)
        self._admit()

    def _admit(self) -> None:
        """Grant reservations in order of arrival while the ledger has room for the first."""
        max_model_len = self.sequences.table.max_model_len
        while self._waiting:
            seq = self._waiting[0]
            if self._gate.shut and self._gate.holds(seq.state, seq.key):
                return
            # A local prompt computes its last position here; otherwise all KV may be cached.
            cached = self.sequences.cached_blocks(seq, seq.length - seq.local)
            most = min(seq.spec.prompt_len + seq.spec.sampling.max_tokens, max_model_len)
            if not self._has_room(seq, cached, seq.length, most):
                return
            if not self.sequences.hold(seq, cached, reserved=True):
                return
            self._waiting.popleft()
            self._grant(seq)

    def _has_room(self, seq: WorkerSequence, cached: list[BlockId], length: int, most: int) -> bool:
        """For its ``length`` tokens now, and what it grows to on its way to ``most``."""
        table, ledger = self.sequences.table, self._ledger
        held = self.sequences.held_rows()
        fresh = self.sequences.blocks_for(length) - len(cached)
        # Acquiring cached blocks takes them out of what others could evict.
        free = self.sequences.pool.num_free - self.sequences.pool.num_free_among(cached)
        growth = ledger.growth(table.length[held], table.max_length[held], table.guaranteed[held])
        own = ledger.growth(np.array([length]), np.array([most]), np.array([seq.guaranteed]))
        return ledger.admits(free, fresh, growth if held.size else None, own)

    def _grant(self, seq: WorkerSequence) -> None:
        seq.enter(State.RESERVED)
        seq.lease = LeaseId(next(self._leases))
        if seq.local or seq.cached_tokens == seq.length:
            self._verified(seq)
        else:
            self._receiver.expect(self._job(seq))
        granted = pb.Granted(
            key=key_message(seq.key), lease=seq.lease, cached_tokens=seq.cached_tokens
        )
        seq.port.send(pb.WorkerMessage(granted=granted))

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
        self._batch.running.append(seq)
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
        self._batch.running.append(seq)
