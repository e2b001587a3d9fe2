"""Whole transfers between two caches in one process."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from paged_caches import slots_of
from unfollowed import Unfollowed

from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone, SendFailed
from kvferry.kv_transfer.push import Push


def test_moves_kv_between_block_sizes(make_pair) -> None:
    pair = make_pair(source_block=4, target_block=16, tokens=Span(5, 150))
    pair.expect()
    pair.send()
    received, sent = (event.account for event in pair.assert_both_done())
    nbytes = pair.tokens.length * pair.source.layout.token_bytes
    assert (received.nbytes, sent.nbytes) == (nbytes, nbytes)
    assert 0 < sent.busy_s <= sent.wall_s <= sent.exposed_s
    assert 0 <= sent.credit_s <= sent.wall_s
    assert 0 < received.busy_s <= received.wall_s
    assert received.transport == sent.transport == pair.receiver.endpoints[0].partition(":")[0]
    assert sent.resends == 0
    assert not pair.receiver.counters


def test_leaves_every_other_slot_alone(make_pair) -> None:
    pair = make_pair(source_block=3, target_block=7, tokens=Span(5, 100))
    before = pair.target.slots.fill_(0.5).clone()
    pair.expect()
    pair.send()
    pair.received.next()
    written = slots_of(pair.target.blocks.block_ids, *pair.tokens, 7)
    before[:, :, written] = pair.target.slots[:, :, written]
    assert before.view(torch.uint8).equal(pair.target.slots.view(torch.uint8))
    pair.assert_equal()


def test_reuses_one_link_for_many_transfers(make_pair) -> None:
    pair = make_pair()
    for lease in range(1, 21):
        pair.expect(lease=lease, request=lease)
        pair.send(lease=lease, request=lease)
    for _ in range(20):
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
    assert pair.sender.num_links == 1


class Watched(Unfollowed):
    """A memory that notes what is packed, and how much of the prompt was computed by then."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.layout, self.rank, self.digests = memory.layout, memory.rank, memory.digests
        self.is_fresh, self.scatter = memory.is_fresh, memory.scatter
        self._changed = threading.Condition()
        self.reports: list[tuple[int, int]] = [(0, 0)]
        self.packed: list[Any] = []
        self.after: list[object] = []

    def pack(
        self, blocks: Any, move: Any, form: Any, slab: Any, after: object = None, *_: object
    ) -> list[int]:
        with self._changed:
            assert any(
                move.tokens.end <= tokens_end
                and (move.layers.end <= layers_end or move.tokens.end <= chunk_begin)
                for layers_end, tokens_end, chunk_begin in map(_report, self.reports)
            ), (move, self.reports)
            self.packed.append(move)
            self.after.append(after)
            self._changed.notify_all()
        return self._memory.pack(blocks, move, form, slab, after)

    def wait_packed(self, layers_end: int, tokens_end: int) -> None:
        """Until the last slab of what was just reported is being packed."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(
                    (move.layers.end, move.tokens.end) == (layers_end, tokens_end)
                    for move in self.packed
                ),
                20.0,
            )


CHUNK = 50


def _report(report: tuple[int, int]) -> tuple[int, int, int]:
    layers_end, tokens_end = report
    return layers_end, tokens_end, tokens_end - CHUNK


@pytest.mark.parametrize("push", list(Push))
def test_is_sent_as_it_is_computed(make_pair, push: Push) -> None:
    """Three layers, chunks of fifty tokens: no slab before its tokens, and all of them once."""
    memories: list[Watched] = []

    def watched(memory: Any) -> Watched:
        memories.append(Watched(memory))
        return memories[-1]

    pair = make_pair(tokens=Span(5, 150), wrap_source=watched, slab_bytes=4096, push=push)
    memory = memories[0]
    pair.expect()
    pair.begin()
    for tokens_end, layers_end in itertools.product((50, 100, 150), (1, 2, 3)):
        memory.reports.append((layers_end, tokens_end))
        pair.sender.computed(pair.key(), layers_end, tokens_end, after=(layers_end, tokens_end))
        if push is Push.LAYERS:
            memory.wait_packed(layers_end, tokens_end)
    _, sent = pair.assert_both_done()
    assert sum(move.nbytes for move in memory.packed) == sent.account.nbytes
    assert sent.account.nbytes == pair.tokens.length * pair.source.layout.token_bytes
    if push is Push.LAYERS:
        assert set(memory.after) == set(memory.reports[1:])
    else:
        assert set(memory.after) == {(3, 150)}


def test_a_rank_that_owes_nothing_is_done_at_once(make_loopback_pair) -> None:
    """The source is the first of two stages, the target's rank holds the second one's layers."""
    pair = make_loopback_pair(
        source_layout={"num_layers": 4, "pp": 2},
        target_layout={"num_layers": 4, "pp": 2},
    )
    pair.begin(target_rank=1)
    done = pair.sent.next()
    assert isinstance(done, SendDone)
    assert done.account.nbytes == 0
    assert pair.sender.num_links == 0


def test_the_same_attempt_to_the_same_rank_twice_is_a_mistake(make_loopback_pair) -> None:
    pair = make_loopback_pair()
    pair.expect()
    pair.begin()
    with pytest.raises(ValueError, match="already"):
        pair.begin()
    pair.sender.abort(pair.key())
    pair.sent.next()


def test_a_type_that_is_not_converted_fails_the_attempt(make_loopback_pair) -> None:
    pair = make_loopback_pair()
    pair.begin(wire="float31")
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.MISMATCH)
    assert "float31" in event.detail


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
    pair.assert_both_done()
