"""The one table of a lease's life: its docstring, its dict and what else is refused."""

from __future__ import annotations

import re

import pytest

from kvferry.kv_transfer import states
from kvferry.kv_transfer.states import TABLE, Event, State, advance

ROW = re.compile(r"^    ([A-Z]+) +([a-z]+) +([A-Z]+)$", re.MULTILINE)
PAIRS = [(state, event) for state in State for event in Event]


def test_the_docstring_is_the_table() -> None:
    assert states.__doc__ is not None
    rows = ROW.findall(states.__doc__)
    assert len(rows) == len(set(rows)) == len(TABLE)
    assert {(State(a), Event(b)): State(c) for a, b, c in rows} == TABLE


def test_the_docstring_says_what_each_state_means() -> None:
    assert states.__doc__ is not None
    for state in State:
        assert re.search(rf"^    {state} +[a-z]+", states.__doc__, re.MULTILINE)


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_pair_is_in_the_table_or_raises(state: State, event: Event) -> None:
    if (state, event) in TABLE:
        assert advance(state, event) is TABLE[state, event]
    else:
        with pytest.raises(RuntimeError, match=f"{event} in state {state}"):
            advance(state, event)


def test_endings_and_renewals_are_legal_in_every_state() -> None:
    for state in State:
        for event in (Event.CLOSE, Event.FAIL, Event.RENEW):
            assert (state, event) in TABLE


def test_nothing_leaves_an_end() -> None:
    for (state, _), after in TABLE.items():
        if state.is_ended:
            assert after is state


def test_an_end_is_reached_from_a_copy_by_its_return_alone() -> None:
    for (state, event), after in TABLE.items():
        if state.is_copying and not after.is_copying:
            assert event is Event.COPIED


def test_what_may_be_copied_is_live_and_what_ended_is_neither() -> None:
    for state in State:
        assert not (state.is_ended and (state.is_live or state.is_copying))
        assert state.is_ended or state.is_live or state.is_copying
    copies = [state for (state, event) in TABLE if event is Event.COPY]
    assert copies == [State.OFFERED]


def test_every_state_is_reached() -> None:
    assert {after for _, after in TABLE.items()} == set(State)
