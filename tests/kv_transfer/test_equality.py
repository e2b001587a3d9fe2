"""Byte equality with slicing and concatenating token by token, over random layouts and faults."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kv_transfer.jobs import ReceiveDone, SendAborted, SendDone, SendFailed
from kvferry.kv_transfer.messages import MAX_FRAME
from kvferry.kv_transfer.plan import Span, plan_slabs

pytestmark = pytest.mark.slow


@st.composite
def moves(draw: st.DrawFn) -> dict[str, Any]:
    begin = draw(st.integers(0, 80))
    return {
        "source_block": draw(st.integers(1, 32)),
        "target_block": draw(st.integers(1, 32)),
        "tokens": Span(begin, begin + draw(st.integers(1, 120))),
        "shape": {
            "num_layers": draw(st.integers(1, 5)),
            "num_kv_heads": draw(st.integers(1, 3)),
            "head_dim": draw(st.sampled_from([1, 3, 8])),
            "dtype": draw(st.sampled_from(["float64", "float32", "bfloat16", "float16"])),
        },
    }


@settings(max_examples=80)
@given(case=moves(), slab_bytes=st.integers(400, 20_000))
def test_pack_and_scatter_equal_slice_and_cat(make_cache, make_layout, case, slab_bytes) -> None:
    tokens, shape = case["tokens"], case["shape"]
    source = make_cache(make_layout(case["source_block"], **shape), tokens.end, 1, fill=True)
    target = make_cache(make_layout(case["target_block"], **shape), tokens.end, 2, fill=False)
    slab = memoryview(bytearray(slab_bytes))
    for move in plan_slabs(source.layout, target.layout, tokens, slab_bytes):
        view = slab[: move.nbytes]
        assert source.memory.is_fresh(source.blocks, move)
        packed = source.memory.pack(source.blocks, move, view)
        assert packed == target.memory.scatter(target.blocks, move, view)
        view[move.nbytes // 3] ^= 1
        assert packed != target.memory.scatter(target.blocks, move, view)
        view[move.nbytes // 3] ^= 1
        target.memory.scatter(target.blocks, move, view)
    assert source.read(*tokens).equal(target.read(*tokens))
    written = target.blocks.slot_ids(tokens, target.layout.block_size)
    target.slots[:, :, written] = 0
    assert not target.slots.any()


@pytest.mark.parametrize(
    ("source_block", "target_block", "tokens"),
    [
        (1, 32, Span(0, 1)),
        (32, 1, Span(31, 33)),
        (16, 16, Span(16, 48)),
        (8, 32, Span(24, 97)),
        (32, 8, Span(7, 200)),
        (5, 7, Span(34, 36)),
    ],
)
def test_transfers_equal_slice_and_cat(make_pair, source_block, target_block, tokens) -> None:
    pair = make_pair(source_block, target_block, tokens)
    pair.expect()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()


class UnreliableChannel:
    """Drops, repeats, delays and damages at random; breaks now and then."""

    def __init__(self, channel: Any, rng: random.Random) -> None:
        self._channel, self._rng = channel, rng
        self._late: list[bytes] = []
        self._staging: Any = None
        self.wake, self.close = channel.wake, channel.close

    def accept_staging(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Any:
        self._staging = self._channel.accept_staging(num_slabs, slab_bytes, timeout_s)
        self._slabs = num_slabs
        return self._staging

    def send(self, frame: bytes, timeout_s: float) -> None:
        if self._staging is None:
            self._channel.send(frame, timeout_s)
            return
        dice = self._rng.random()
        if dice < 0.02:
            self._channel.close()
        elif dice < 0.05:
            return
        elif dice < 0.10:
            self._late.append(frame)
            return
        elif dice < 0.15:
            slab = self._staging.slab(self._rng.randrange(self._slabs))
            slab[self._rng.randrange(len(slab))] ^= 1
        for each in [frame, *self._late, *([frame] if dice > 0.9 else [])]:
            self._channel.send(each, timeout_s)
        self._late.clear()

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        frame = self._channel.receive(timeout_s, limit)
        lost = self._staging is not None and self._rng.random() < 0.03
        return None if lost else frame


@pytest.mark.parametrize("round_number", range(4))
def test_whatever_happens_done_means_equal_and_every_job_ends_once(
    make_loopback_pair, seeded: int, round_number: int
) -> None:
    rng = random.Random(seeded + round_number)
    pair = make_loopback_pair(
        tokens=Span(3, 90),
        wrap=lambda channel: UnreliableChannel(channel, rng),
        progress_timeout_s=0.1,
        beat_s=0.05,
        silence_s=0.5,
    )
    for number in range(1, 13):
        pair.target.slots.zero_()
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
        if rng.random() < 0.2:
            pair.sender.abort(pair.key(request=number))
        sent = pair.sent.next()
        assert sent.key == pair.key(request=number)
        pair.receiver.release(number)
        received = pair.received.next()
        assert received.key == pair.key(request=number)
        if isinstance(received, ReceiveDone):
            pair.assert_equal()
        if isinstance(sent, SendDone):
            assert isinstance(received, ReceiveDone)
        assert isinstance(sent, SendDone | SendFailed | SendAborted)
    pair.sent.assert_none()
    pair.received.assert_none()
