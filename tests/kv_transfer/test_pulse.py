"""Silence and beats of a link, on a clock of the test's own."""

from __future__ import annotations

import pytest
from lease_table import Clock
from receiver_bench import OPTIONS

from kvferry.core.errors import LinkLost
from kvferry.kv_transfer.pulse import Pulse


def test_silence_is_believed_once_what_is_queued_was_read() -> None:
    clock = Clock()
    pulse = Pulse(OPTIONS, clock)
    clock.now += OPTIONS.silence_s - 0.5
    assert not pulse.is_doubtful()
    assert pulse.wait_s() == -OPTIONS.silence_s + 0.5 + OPTIONS.beat_s
    clock.now += 0.5
    assert pulse.is_doubtful()
    pulse.heard()
    assert not pulse.is_doubtful()
    clock.now += OPTIONS.silence_s
    assert pulse.is_doubtful()
    with pytest.raises(LinkLost, match="silent"):
        pulse.is_doubtful()


def test_any_message_beats() -> None:
    clock = Clock()
    pulse = Pulse(OPTIONS, clock)
    clock.now += 0.75 * OPTIONS.beat_s
    assert not pulse.needs_beat()
    pulse.sent()
    clock.now += 0.75 * OPTIONS.beat_s
    assert not pulse.needs_beat()
    assert pulse.wait_s() == 0.25 * OPTIONS.beat_s
    clock.now += 0.25 * OPTIONS.beat_s
    assert pulse.needs_beat()
    assert pulse.wait_s() == 0.0
