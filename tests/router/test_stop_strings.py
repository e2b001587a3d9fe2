"""Stop strings: nothing of a match is released, only a possible prefix is held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.stop_strings import StopStrings

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], str | None]:
    """What each piece releases, the flush last; and the match."""
    watcher, released = StopStrings(stops), []
    for piece in pieces:
        text, stop = watcher.feed(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, watcher.flush()], None


def reference(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The first match to end, the longest of those, found by looking at every end."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_alphabet_with_a_stop_over_several_pieces() -> None:
    released, stop = run(("hijklmn",), [ALPHABET[i : i + 3] for i in range(0, 26, 3)])
    assert stop == "hijklmn"
    assert "".join(released) == "abcdefg"
    assert released[2] == "g", "h may begin the match and is held back"


def test_only_a_true_prefix_is_held_back() -> None:
    released, stop = run(("xyz",), ["ax", "b", "xy", "xyy", "end"])
    assert released == ["a", "xb", "", "xyxyy", "end", ""]
    assert stop is None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (("ab", "abc"), ["xabc"], "x", "ab"),
        (("abc", "ab"), ["xab", "c"], "x", "ab"),
        (("abcd", "bc"), ["abcd"], "a", "bc"),
        (("aab",), ["aaab"], "a", "aab"),
        (("bcd", "abcd"), ["xa", "bc", "d"], "x", "abcd"),
        (("\n\n",), ["one\n", "\ntwo"], "one", "\n\n"),
        (("stop!",), ["never sto", "p"], "never stop", None),
        (("stop",), ["sto"], "sto", None),
        ((), ["any", "thing"], "anything", None),
        (("\U0001f389",), ["a\U0001f389b"], "a", "\U0001f389"),
    ],
)
def test_cases(stops: tuple[str, ...], pieces: list[str], text: str, stop: str | None) -> None:
    released, matched = run(stops, pieces)
    assert ("".join(released), matched) == (text, stop)


@given(
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=12),
)
def test_outcome_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    released, matched = run(stops, pieces)
    assert ("".join(released), matched) == reference(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_held_back_is_the_longest_possible_prefix(stops: list[str], pieces: list[str]) -> None:
    released, matched = run(stops, pieces)
    if matched is not None:
        return
    seen = "".join(pieces)
    held = released[-1]
    prefixes = [stop[:k] for stop in stops for k in range(1, len(stop))]
    longest = max((p for p in prefixes if seen.endswith(p)), key=len, default="")
    assert held == longest


def test_long_stop_strings_cost_little() -> None:
    """Steps of the automaton, counted: at most two per character and stop string."""
    stop = "a" * 1023 + "b"
    watcher = StopStrings((stop,) * 16)
    text, matched = watcher.feed("a" * 20_000)
    assert matched is None
    assert len(text) == 20_000 - 1023
