"""Whole transfers between two caches in one process."""

from __future__ import annotations

import torch

from kvferry.kv_transfer.jobs import ReceiveDone, SendDone
from kvferry.kv_transfer.plan import Span


def test_moves_kv_between_block_sizes(make_pair) -> None:
    pair = make_pair(source_block=4, target_block=16, tokens=Span(5, 150))
    pair.expect()
    pair.send()
    received, sent = pair.received.next(), pair.sent.next()
    nbytes = pair.tokens.length * pair.source.layout.token_bytes
    assert isinstance(received, ReceiveDone)
    assert isinstance(sent, SendDone)
    assert (received.nbytes, sent.nbytes) == (nbytes, nbytes)
    assert 0 < sent.busy_s <= sent.wall_s
    assert 0 < received.busy_s <= received.wall_s
    pair.assert_equal()
    assert not pair.receiver.counters


def test_leaves_every_other_slot_alone(make_pair) -> None:
    pair = make_pair(source_block=3, target_block=7, tokens=Span(5, 100))
    before = pair.target.slots.fill_(0.5).clone()
    pair.expect()
    pair.send()
    pair.received.next()
    written = pair.target.blocks.slot_ids(pair.tokens, 7)
    before[:, :, written] = pair.target.slots[:, :, written]
    assert before.view(torch.uint8).equal(pair.target.slots.view(torch.uint8))
    pair.assert_equal()


def test_reuses_one_link_for_many_transfers(make_pair) -> None:
    pair = make_pair()
    for lease in range(20):
        pair.expect(lease=lease, request=lease)
        pair.send(lease=lease, request=lease)
    for _ in range(20):
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
    assert pair.sender.num_links == 1
