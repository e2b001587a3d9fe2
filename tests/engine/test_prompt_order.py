"""The order of prompts: by deadline, then shortest remaining, and nobody starves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.prompt_order import Wait, is_before, overtaken, prompt_order, urgency

INF = math.inf


def order(*waits: Wait, patience: int = 100) -> list[int]:
    return prompt_order(waits, patience)


def test_the_shortest_goes_first_among_equally_urgent_ones() -> None:
    assert order(Wait(50, 600.0), Wait(7, 590.0), Wait(7, INF), Wait(20, 599.0)) == [1, 3, 0, 2]


def test_whoever_has_half_the_time_left_goes_before_shorter_ones() -> None:
    assert order(Wait(3, 600.0), Wait(500, 250.0), Wait(900, 1.5)) == [2, 1, 0]
    assert order(Wait(3, 500.0), Wait(9, 260.0)) == [0, 1]


def test_a_deadline_that_has_passed_is_as_urgent_as_can_be() -> None:
    assert urgency(-5.0) == urgency(0.0) == urgency(2.0**-10) < urgency(2.0**-8)
    assert urgency(INF) == urgency(2.0**20) > urgency(2.0**19)


def test_due_prompts_go_first_in_order_of_arrival() -> None:
    waits = Wait(90, INF, 100), Wait(1, 0.01), Wait(80, INF, 250), Wait(2, 0.01, 99)
    assert order(*waits) == [0, 2, 1, 3]


def test_those_that_go_before_a_newcomer() -> None:
    newcomer = Wait(10, 60.0)
    assert is_before(Wait(10, 60.0), newcomer, 100)
    assert not is_before(Wait(11, 60.0), newcomer, 100)
    assert is_before(Wait(11, 60.0, 100), newcomer, 100)
    assert is_before(Wait(11, 1.0), newcomer, 100)


def test_only_tokens_of_younger_prompts_count_and_only_while_it_waits() -> None:
    #                 all left, part left, done in this step, nothing, youngest
    assert overtaken([5, 8, 3, 9, 4], [0, 2, 3, 0, 4]) == [9, 7, 0, 4, 0]


@dataclass
class Prompt:
    """One prompt of a simulated worker."""

    left: int
    deadline_s: float
    bound: float
    overtaken: int = 0
    waited: int = 0


arrivals = st.lists(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 100.0)), max_size=3), max_size=30
)


@settings(max_examples=300, deadline=None)
@given(arrivals=arrivals, budget=st.integers(1, 20), patience=st.integers(0, 60))
def test_no_prompt_waits_longer_than_the_bound(
    arrivals: list[list[tuple[int, float]]], budget: int, patience: int
) -> None:
    prompts: list[Prompt] = []
    now = 0
    while prompts or now < len(arrivals):
        for length, time_left_s in arrivals[now] if now < len(arrivals) else ():
            older = sum(p.left for p in prompts)
            bound = (older + length + patience) / budget + 2
            prompts.append(Prompt(length, now + time_left_s, bound))
        waits = [Wait(p.left, p.deadline_s - now, p.overtaken) for p in prompts]
        counts = [0] * len(prompts)
        left = budget
        for i in prompt_order(waits, patience):
            counts[i] = min(left, prompts[i].left)
            left -= counts[i]
        by = overtaken([p.left for p in prompts], counts)
        for prompt, count, tokens in zip(prompts, counts, by, strict=True):
            prompt.left -= count
            prompt.waited += 1
            prompt.overtaken += tokens
            assert prompt.overtaken < patience + budget
            assert prompt.waited <= prompt.bound
        prompts = [p for p in prompts if p.left]
        now += 1
