"""How a receiver's link ends, and what keeps it alive."""

from __future__ import annotations

import pytest
from lease_table import ONE
from receiver_bench import SLAB_BYTES, Bench

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.messages import Beat, Return
from kvferry.kv_transfer.receiver_link import UNUSED_TIMEOUTS


def test_bytes_that_never_come_end_the_link() -> None:
    bench = Bench(arrives=False)
    (credit,) = bench.offer(1)
    bench.fill(credit, 0)
    bench.clock.now += 4.9
    bench.hear(Beat())
    bench.clock.now += 0.2
    bench.link.handle(encode(Beat()))
    with pytest.raises(LinkLost, match="bytes of a slab"):
        bench.link.turn()
    assert not bench.leases.events


def test_a_grant_that_nobody_uses_ends_the_link() -> None:
    bench = Bench()
    bench.offer(1)
    for _ in range(int(UNUSED_TIMEOUTS * 5) - 1):
        bench.clock.now += 1.0
        bench.hear(Beat())
    bench.clock.now += 1.0
    bench.link.handle(encode(Beat()))
    with pytest.raises(LinkLost, match="use of a granted slab"):
        bench.link.turn()


def test_a_broken_path_ends_the_link() -> None:
    bench = Bench(arrives=False)
    (credit,) = bench.offer(1)
    bench.fill(credit, 0)
    bench.inlet.is_broken = True
    with pytest.raises(LinkLost, match="broke"):
        bench.turn()


@pytest.mark.parametrize("nbytes", [0, SLAB_BYTES + 1, 2**63])
def test_a_slab_of_no_or_too_many_bytes_ends_the_link(nbytes: int) -> None:
    bench = Bench(is_pulled=True)
    (credit,) = bench.offer(1)
    with pytest.raises(ProtocolError):
        bench.fill(credit, 0, nbytes=nbytes)
    assert bench.inlet.pulls == []


def test_silence_ends_the_link_and_beats_are_sent() -> None:
    bench = Bench()
    assert bench.link.turn() == pytest.approx(1.0)
    bench.clock.now += 1.0
    assert bench.link.turn() == pytest.approx(1.0)
    assert list(bench.channel.sent) == [Beat()]
    bench.clock.now += 0.5
    bench.link.turn()
    assert list(bench.channel.sent) == [Beat()]
    bench.clock.now += 3.5
    assert bench.link.turn() == 0.0, "what is queued is read first"
    with pytest.raises(LinkLost, match="silent"):
        bench.link.turn()


def test_after_a_pause_of_ours_a_peer_that_spoke_is_not_silent() -> None:
    bench = Bench()
    for _ in range(2):
        bench.clock.now += 60.0
        assert bench.link.turn() == 0.0
        bench.link.handle(encode(Beat()))
        assert bench.link.turn() == pytest.approx(1.0)


def test_a_retired_link_ends() -> None:
    bench = Bench()
    bench.link.retire()
    assert bench.channel.wakes == 1
    with pytest.raises(LinkLost):
        bench.turn()
    bench.link.close()
    assert bench.inlet.closed


def test_a_closed_link_is_not_woken_any_more() -> None:
    """Else a lease would hold the slab memory of all links that it ever had."""
    bench = Bench()
    (credit,) = bench.offer(1)
    bench.leases.offer()
    bench.leases.claim(1)
    bench.fill(credit, 0)
    bench.link.close()
    bench.leases.settle(1)
    bench.leases.table.release(ONE)
    assert bench.channel.wakes == 0


def test_a_link_is_idle_while_nothing_is_wanted_or_granted() -> None:
    bench = Bench(num_slabs=1)
    assert bench.link.idle_since_s == bench.clock.now
    (credit,) = bench.offer(1)
    assert bench.link.idle_since_s is None
    bench.clock.now += 2.0
    bench.hear(Return(slab=credit.slab, grant=credit.grant))
    assert bench.link.idle_since_s == bench.clock.now
    bench.clock.now += 1.0
    bench.turn()
    assert bench.link.idle_since_s == bench.clock.now - 1.0
