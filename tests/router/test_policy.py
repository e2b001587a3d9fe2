"""When a decode worker computes the rest of a prompt itself."""

from __future__ import annotations

import pytest

from kvferry.router.policy import Candidate, computes_locally


def worker(cached: int, load: int = 0, number: int = 0) -> Candidate:
    return Candidate(number=number, cached_tokens=cached, load=load)


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (worker(90), [worker(0)], True),
        (worker(90), [worker(80)], True),
        (worker(90), [worker(90)], False),  # no sooner, and decodes would wait for it
        (worker(90), [worker(95)], False),
        (worker(90), [worker(90, load=1)], True),
        (worker(90, load=50), [worker(60)], False),  # prompts wait there already
        (worker(90, load=50), [worker(60, load=30)], True),
        (worker(90), [worker(0), worker(95)], False),  # the best of them counts
        (worker(80), [worker(0)], True),
        (worker(79), [worker(0)], False),  # more than its steps can bear
        (worker(90), [], True),  # else it would wait for one that is free
    ],
)
def test_where_it_is_cheaper_and_within_the_bound(
    decode: Candidate, prefill: list[Candidate], expected: bool
) -> None:
    assert computes_locally(100, decode, prefill, most_tokens=20) == expected
