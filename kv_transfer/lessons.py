"""What finished transfers say about the rates that the push policy goes by."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.outgoing import Transfer
from kvferry.kv_transfer.push import PushPolicy

MAX_SENT = 256
"""Prompts remembered that arrived before their first token stood; the newest."""


class Lessons:
    """Any thread may call it."""

    def __init__(self, policy: PushPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._sent: dict[AttemptKey, Transfer] = {}

    def sent(self, transfer: Transfer) -> None:
        """A transfer went through."""
        account, tokens = transfer.account, transfer.job.tokens
        if not transfer.owed.parts or account.resends:
            return
        self._policy.learn_pack(account.nbytes, account.busy_s)
        self._policy.learn_send(transfer.tail_nbytes, account.exposed_s)
        if transfer.first_report is None or transfer.computed_s is None:
            return
        begun, begun_s = transfer.first_report
        layers, seconds = transfer.owed.parts[0].layers, transfer.computed_s - begun_s
        done = (begun.layers_end - layers.begin) * (begun.tokens_end - tokens.begin)
        left = layers.length * tokens.length - max(0, done)
        if left > 0 and seconds > 0:
            self._policy.learn_compute(tokens.length, left, seconds, transfer.overlapped_s)
        with self._lock:
            self._sent[transfer.job.key] = transfer
            if len(self._sent) > MAX_SENT:
                del self._sent[next(iter(self._sent))]

    def first_token(self, key: AttemptKey, live: Sequence[Transfer], now: float) -> None:
        """A prompt's first token stands. ``live``: its transfers that are still under way."""
        with self._lock:
            sent = self._sent.pop(key, None)
        for transfer in (*live, *([sent] if sent else [])):
            if transfer.computed_s is not None and not transfer.is_first_token_known:
                transfer.is_first_token_known = True
                self._policy.learn_rest(transfer.job.tokens.length, now - transfer.computed_s)
