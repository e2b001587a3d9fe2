"""When to send: while later layers are computed, or all at once when the prompt is done.

A pure function of measured rates. C seconds pass until the last layer's keys and values stand, r
more until the first token does; with g sends of equal parts, each taking x seconds from standing
ready to acknowledged, the prompt is done, and sent, after

    max(C + s + r, C + s + x, C / g + g x)

whichever limits, the computation or the sends. s is what the g - 1 packs beside the computation
cost it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

WEIGHT = 0.2
"""Of the newest sample."""
SLOWDOWN = 0.5
"""Seconds of computation that a second of packing beside it costs, until that is measured."""
MAX_SLOWDOWN = 4.0
WORTH = 0.98
"""Several sends are chosen when the prompt is done and sent in this part of the time with one."""
CLOSE = 1.002
"""Fewer sends are as good as more that are not faster by more than this."""
REFRESH = 32
"""One prompt in so many is sent at once: the rate of undisturbed computation is to stay known."""
FORGET = 0.01
"""Part of the measured slowdown that a prompt sent at once makes us forget: what is not tried any
more is not measured either, and must not decide for ever.
"""


class Push(StrEnum):
    """What the configuration asks for."""

    AUTO = "auto"
    LAYERS = "layers"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be sent of one."""

    nbytes: int
    layers: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Measured, of prompts about as long."""

    layer_token_s: float
    """Computation of one token in one layer."""
    send_s: float
    """A send of nothing, from standing ready to acknowledged."""
    byte_s: float
    """What each byte adds to that."""
    pack_byte_s: float
    """Of which packing takes."""
    slowdown: float = SLOWDOWN
    """Seconds of computation that a second of packing beside it costs."""
    rest_s: float = 0.0
    """Computation after the last layer's keys and values stand."""


def total_s(prompt: Prompt, estimate: Estimate, num_sends: int) -> float:
    """Seconds until a prompt has its first token, and its KV has arrived."""
    send_s = estimate.send_s + estimate.byte_s * prompt.nbytes / num_sends
    compute_s = estimate.layer_token_s * prompt.layers * prompt.tokens
    pack_s = estimate.pack_byte_s * prompt.nbytes * (num_sends - 1) / num_sends
    slowed_s = compute_s + estimate.slowdown * pack_s
    return max(slowed_s + max(estimate.rest_s, send_s), compute_s / num_sends + num_sends * send_s)


def best_sends(prompt: Prompt, estimate: Estimate) -> int:
    """The number of sends that takes the least time: one, unless several are clearly better."""
    totals = {sends: total_s(prompt, estimate, sends) for sends in range(2, prompt.layers + 1)}
    least_s = min(totals.values(), default=inf)
    if not least_s < WORTH * total_s(prompt, estimate, 1):
        return 1
    return next(sends for sends, total in totals.items() if total <= CLOSE * least_s)


def least_bytes(prompt: Prompt, estimate: Estimate) -> float:
    """How much must stand ready before it is sent (``plan.Cutter``); infinity: all of it."""
    sends = best_sends(prompt, estimate)
    return inf if sends == 1 else prompt.nbytes / sends


@dataclass(slots=True)
class Mean:
    """An average in which the newest sample has the weight ``WEIGHT``."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        self.count += 1
        self.value += max(WEIGHT, 1 / self.count) * (sample - self.value)


@dataclass(slots=True)
class Line:
    """Seconds as a linear function of bytes, through samples with fading weights."""

    _x: Mean = field(default_factory=Mean)
    _y: Mean = field(default_factory=Mean)
    _xx: Mean = field(default_factory=Mean)
    _xy: Mean = field(default_factory=Mean)

    @property
    def count(self) -> int:
        return self._x.count

    def add(self, nbytes: float, seconds: float) -> None:
        self._x.add(nbytes)
        self._y.add(seconds)
        self._xx.add(nbytes * nbytes)
        self._xy.add(nbytes * seconds)

    def fit(self) -> tuple[float, float]:
        """(seconds of nothing, seconds per byte), neither negative.

        Samples too much alike to tell the two apart count half for each.
        """
        x, y = self._x.value, self._y.value
        spread = self._xx.value - x * x
        half = y / (2 * x) if x else 0.0
        slope = half if spread <= 0.01 * x * x else (self._xy.value - x * y) / spread
        slope = min(max(0.0, slope), y / x if x else 0.0)
        return y - slope * x, slope


class PushPolicy:
    """Learns the rates of one sender and decides for each prompt. Any thread may call it."""

    def __init__(self, push: Push = Push.AUTO) -> None:
        self._push = push
        self._lock = threading.Lock()
        self._compute: defaultdict[int, Mean] = defaultdict(Mean)
        """Seconds per layer and token with nothing packed beside it, by length of the prompt."""
        self._rest: defaultdict[int, Mean] = defaultdict(Mean)
        self._prompts: defaultdict[int, int] = defaultdict(int)
        self._send = Line()
        self._pack = Mean()
        self._slowdown = Mean(SLOWDOWN, 1)

    def least_bytes(self, prompt: Prompt) -> float:
        """How much of a prompt must stand ready before it is sent; infinity: all of it.

        All at once, too, before prompts of about that length have been measured.
        """
        if self._push is Push.LAYERS:
            return 0.0
        if self._push is Push.WHOLE:
            return inf
        with self._lock:
            size = _size(prompt.tokens)
            self._prompts[size] += 1
            estimate = self._estimate(size)
            if estimate is None or self._prompts[size] % REFRESH == 0:
                return inf
            least = least_bytes(prompt, estimate)
            if least == inf:
                self._slowdown.value += FORGET * (SLOWDOWN - self._slowdown.value)
        return least

    def estimate(self, tokens: int) -> Estimate | None:
        """What is known about prompts of about that length; None before any is measured."""
        with self._lock:
            return self._estimate(_size(tokens))

    def learn_send(self, nbytes: int, seconds: float) -> None:
        """So much stood ready at once, and was acknowledged after so long."""
        with self._lock:
            self._send.add(nbytes, seconds)

    def learn_pack(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            if nbytes:
                self._pack.add(seconds / nbytes)

    def learn_compute(
        self, tokens: int, layer_tokens: float, seconds: float, pack_s: float
    ) -> None:
        """A prompt of ``tokens``, or the ``layer_tokens`` of it that were timed, took so long, with
        ``pack_s`` seconds of packing beside it.
        """
        with self._lock:
            alone = self._compute[_size(tokens)]
            if not pack_s:
                alone.add(seconds / layer_tokens)
            elif alone.count:
                lost = (seconds - alone.value * layer_tokens) / pack_s
                self._slowdown.add(min(max(0.0, lost), MAX_SLOWDOWN))

    def learn_rest(self, tokens: int, seconds: float) -> None:
        """From the last layer's keys and values to the end of the step took so long."""
        with self._lock:
            self._rest[_size(tokens)].add(seconds)

    def _estimate(self, size: int) -> Estimate | None:
        alone = self._compute.get(size)
        if alone is None or not alone.count or not self._send.count or not self._pack.count:
            return None
        send_s, byte_s = self._send.fit()
        return Estimate(
            layer_token_s=alone.value,
            send_s=send_s,
            byte_s=byte_s,
            pack_byte_s=self._pack.value,
            slowdown=self._slowdown.value,
            rest_s=self._rest[size].value,
        )


def _size(tokens: int) -> int:
    """Prompts of the same size class take about as long per token: within a factor of two."""
    return tokens.bit_length()
