"""One attempt's dealings with one worker: its messages, and what the router counts there for it."""

from __future__ import annotations

from kvferry.proto import worker_pb2 as pb
from kvferry.router.mailbox import Mailbox
from kvferry.router.progress import Progress
from kvferry.router.session import WorkerSession


class Side:
    """From ``claim_prompt`` or ``reserve`` to ``release``; counts never outlive it."""

    def __init__(self, session: WorkerSession, progress: Progress, mailbox: Mailbox) -> None:
        self.session = session
        self.view = session.view
        self.over = False
        """The worker has ended its part by itself: there is nothing left to cancel."""
        self._key = progress.key()
        self._mailbox = mailbox
        self._open = False
        self._prompt: int | None = None
        self._reserving = 0
        self._active = 0

    def reserve(
        self, spec: pb.SequenceSpec, *, local: bool = False, fork_of: pb.Key | None = None
    ) -> None:
        self._count(reserving=1, active=1)
        reserve = pb.Reserve(key=self._key, sequence=spec, local=local, fork_of=fork_of)
        self._send(pb.RouterMessage(reserve=reserve))

    def granted(self) -> None:
        self._count(reserving=-self._reserving)

    def claim_prompt(self, num_tokens: int) -> None:
        """Count a prompt here from the moment it was dispatched, before the worker hears of it."""
        self._prompt = num_tokens
        self.view.prompts.append(num_tokens)
        self.session.changed()

    def prefill(self, spec: pb.SequenceSpec, target: pb.Target | None) -> None:
        prefill = pb.Prefill(key=self._key, sequence=spec, target=target)
        self._send(pb.RouterMessage(prefill=prefill))

    def prefilled(self) -> None:
        if self._prompt is not None:
            self.view.prompts.remove(self._prompt)
            self._prompt = None
        self.session.changed()

    def start(self, token_id: int) -> None:
        self._send(pb.RouterMessage(start=pb.Start(key=self._key, token_id=token_id)))

    def release(self) -> None:
        """Give up all counts, and tell the worker unless it has ended already. Idempotent."""
        if self._open:
            self._open = False
            self.session.forget(self._key)
            if not self.over and self.view.routable:
                self.session.send(pb.RouterMessage(cancel=pb.Cancel(key=self._key)))
        self.prefilled()
        self._count(reserving=-self._reserving, active=-self._active)

    def _send(self, message: pb.RouterMessage) -> None:
        if not self._open:
            self._open = True
            self.session.register(self._key, self._mailbox)
        self.session.send(message)

    def _count(self, *, reserving: int = 0, active: int = 0) -> None:
        self._reserving += reserving
        self._active += active
        self.view.reserving += reserving
        self.view.active += active
        self.session.changed()
