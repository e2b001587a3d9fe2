"""Which path is taken: by measurement, by order, by force, and around what is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_transports import ENDPOINTS, PEER, TRANSPORTS

from kvferry.core.errors import ConfigError, LinkRefused
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.choices import MAX_RANKS, Choices, Path
from kvferry.kv_transfer.endpoints import Medium


def choices(**options: Any) -> Choices:
    return Choices(transports=TRANSPORTS, **options)


def measured(some: Choices, **rates: tuple[float, float]) -> None:
    """Bytes per second and round trip by transport."""
    for path in some.paths(PEER, 0, ENDPOINTS):
        if path.transport in rates:
            rate, round_trip_s = rates[path.transport]
            some.measured(replace(path, rate=rate, round_trip_s=round_trip_s, peak=4e9, broken=""))


def choose(some: Choices) -> str:
    return some.choose(PEER, 0, ENDPOINTS)


def by_transport(some: Choices) -> dict[str, Path]:
    return {path.transport: path for path in some.paths(PEER, 0, ENDPOINTS)}


def test_before_anything_is_measured_the_order_of_the_transports_decides() -> None:
    some = choices()
    assert choose(some) == "fast:1"
    paths = some.paths(PEER, 0, ENDPOINTS)
    assert [path.transport for path in paths] == ["fast", "slow", "open", "absent", "new"]
    assert [path.chosen for path in paths] == [True, False, False, False, False]


def test_each_path_says_why_it_cannot_be_used() -> None:
    paths = by_transport(choices())
    assert {name: path.why_not for name, path in paths.items()} == {
        "fast": "",
        "slow": "",
        "open": "needs transfer.trusted_network",
        "absent": "no device",
        "new": "unknown here",
    }
    assert by_transport(choices(trusted_network=True))["open"].why_not == ""


def test_the_fastest_is_taken() -> None:
    some = choices()
    measured(some, fast=(1e9, 1e-4), slow=(3e9, 1e-3))
    assert choose(some) == "slow:1"
    path = by_transport(some)["slow"]
    assert (path.chosen, path.rate, path.peak) == (True, 3e9, 4e9)
    assert path.medium is Medium.NETWORK
    assert not by_transport(some)["fast"].chosen


def test_the_network_must_be_clearly_faster_than_memory() -> None:
    """It takes more processor time, and a measurement under load may err."""
    some = choices()
    measured(some, fast=(1e9, 1e-3), slow=(1.8e9, 1e-4))
    assert choose(some) == "fast:1"


def test_of_two_about_as_fast_the_shorter_round_trip_is_taken() -> None:
    some = choices()
    measured(some, fast=(0.98e9, 1e-4), slow=(2e9, 1e-3))
    assert choose(some) == "fast:1"


def test_what_is_measured_goes_before_what_is_not() -> None:
    some = choices()
    measured(some, slow=(1e6, 1e-3))
    assert choose(some) == "slow:1"


def test_a_broken_path_is_passed_over_until_it_works_again() -> None:
    some = choices()
    measured(some, fast=(2e9, 1e-4), slow=(1e9, 1e-4))
    assert some.failed(PEER, 0, "fast:1", "reset").why_not == "reset"
    assert choose(some) == "slow:1"
    assert some.has_other(PEER, 0)
    some.works(PEER, 0, "fast:1")
    assert choose(some) == "fast:1"
    assert by_transport(some)["fast"].num_breaks == 0


def test_a_measurement_mends_a_path_or_breaks_it() -> None:
    some = choices()
    choose(some)
    some.failed(PEER, 0, "fast:1", "reset")
    measured(some, fast=(2e9, 1e-4))
    assert choose(some) == "fast:1"
    some.measured(replace(by_transport(some)["fast"], rate=0.0, broken="no answer"))
    assert choose(some) == "slow:1"
    assert by_transport(some)["fast"].num_breaks == 2


def test_a_probe_that_fails_says_nothing_against_transfers_that_went_through() -> None:
    """The receiver may have had no memory for it."""
    some = choices()
    choose(some)
    some.works(PEER, 0, "fast:1")
    some.measured(replace(by_transport(some)["fast"], broken="no slab memory left"))
    assert choose(some) == "fast:1"
    some.failed(PEER, 0, "fast:1", "reset")
    assert not by_transport(some)["fast"].proven


def test_when_all_are_broken_the_one_that_broke_first_is_tried() -> None:
    """A worker must not be out of reach for ever because its links broke once."""
    some = choices()
    choose(some)
    for endpoint in ("slow:1", "fast:1"):
        some.failed(PEER, 0, endpoint, "gone")
    assert not some.has_other(PEER, 0)
    assert choose(some) == "slow:1"
    some.failed(PEER, 0, "slow:1", "gone")
    assert choose(some) == "fast:1"


def test_ranks_and_lives_of_a_receiver_are_apart() -> None:
    some = choices()
    choose(some)
    some.failed(PEER, 0, "fast:1", "gone")
    assert some.choose(PEER, 1, ENDPOINTS) == "fast:1"
    assert some.choose(Incarnation(6), 0, ENDPOINTS) == "fast:1"
    assert some.failed(Incarnation(8), 0, "fast:1", "who?") is None
    some.works(Incarnation(8), 0, "fast:1")


def test_endpoints_that_are_no_longer_named_are_forgotten() -> None:
    """B006: what a departed listener's address was like says nothing of its successor's."""
    some = choices()
    measured(some, fast=(2e9, 1e-4))
    assert some.choose(PEER, 0, ("fast:2", "slow:1")) == "fast:2"
    assert {path.endpoint for path in some.rows()} == {"fast:2", "slow:1"}
    some.measured(Path(PEER, 0, "fast:1", "fast", Medium.MEMORY, rate=1.0))
    assert {path.endpoint for path in some.rows()} == {"fast:2", "slow:1"}


def test_a_forced_transport_is_taken_however_slow_or_broken() -> None:
    some = choices(forced="slow")
    measured(some, fast=(9e9, 1e-4), slow=(1.0, 1.0))
    assert choose(some) == "slow:1"
    some.failed(PEER, 0, "slow:1", "reset")
    assert choose(some) == "slow:1"
    assert by_transport(some)["fast"].why_not == "transfer.transport is slow"


@pytest.mark.parametrize(
    ("forced", "reason"),
    [
        ("absent", "transfer.transport is absent: no device"),
        ("open", "transfer.transport is open: needs transfer.trusted_network"),
        ("new", "transfer.transport is new: unknown here"),
        ("other", "transfer.transport is other: the peer does not offer it"),
    ],
)
def test_a_forced_transport_that_cannot_be_used_is_named(forced: str, reason: str) -> None:
    some = choices(forced=forced)
    with pytest.raises(LinkRefused) as caught:
        choose(some)
    assert str(caught.value) == reason
    with pytest.raises(ConfigError, match=f"transfer.transport: {forced}: "):
        some.check()


def test_a_forced_transport_that_can_be_used_is_no_mistake() -> None:
    choices(forced="fast").check()
    choices().check()


def test_no_usable_transport_is_refused_with_all_reasons() -> None:
    some = choices()
    with pytest.raises(LinkRefused, match="absent: no device; new: unknown here"):
        some.choose(PEER, 0, ("absent:1", "new:1"))
    with pytest.raises(LinkRefused, match="the peer offers none"):
        some.choose(PEER, 0, ())


def test_only_so_many_ranks_are_remembered() -> None:
    some = choices()
    for peer in range(MAX_RANKS + 2):
        some.choose(Incarnation(peer), 0, ("fast:1",))
    rows = some.rows()
    assert len(rows) == MAX_RANKS
    assert rows[0].peer == 2
