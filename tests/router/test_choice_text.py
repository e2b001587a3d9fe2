"""Text, tokens and log-probabilities of one choice, step by step."""

from __future__ import annotations

import math
from typing import Any

from fake_engine import EOS, ByteCodec, script
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.request import FinishReason, GenerateRequest, TextDelta, TokenLogprob, TokenStep
from kvferry.core.sampling import SamplingParams
from kvferry.router.choice_text import ChoiceText
from kvferry.router.intake import PreparedPrompt


def choice(**sampling: Any) -> ChoiceText:
    request = GenerateRequest(prompt_token_ids=(72,), sampling=SamplingParams(**sampling))
    return ChoiceText(ByteCodec(), PreparedPrompt(request=request, text="H"), 3)


def play(text: ChoiceText, steps: list[TokenStep]) -> list[TextDelta]:
    deltas = []
    for step in steps:
        deltas.append(text.feed(step))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def joined(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens(deltas: list[TextDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_end_of_sequence_shows_as_a_token_without_text() -> None:
    deltas = play(choice(), script("ab"))
    assert joined(deltas) == "ab"
    assert tokens(deltas) == [97, 98, EOS]
    assert (deltas[-1].index, deltas[-1].finish_reason) == (3, FinishReason.STOP)
    assert deltas[-1].stop_reason is None


def test_stop_token_is_named_and_its_text_left_out() -> None:
    steps = [TokenStep((97,)), TokenStep((66,), finish_reason=FinishReason.STOP)]
    deltas = play(choice(stop_token_ids=(66,)), steps)
    assert joined(deltas) == "a"
    assert deltas[-1].stop_reason == 66


def test_stop_string_cuts_text_and_tokens() -> None:
    text = choice(stop=("lo w",))
    deltas = play(text, script("hello world"))
    assert joined(deltas) == "hel"
    assert tokens(deltas) == list(b"hel")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "lo w")
    assert text.num_tokens == len("hello w")


def test_stop_string_inside_one_step_of_many_tokens() -> None:
    deltas = play(choice(stop=("b",)), [TokenStep(tuple(b"abcdef"))])
    assert (joined(deltas), tokens(deltas)) == ("a", [97])


def test_near_match_at_the_end_is_flushed() -> None:
    for finish in FinishReason:
        deltas = play(choice(stop=("world!",)), script("my world", finish=finish))
        assert joined(deltas) == "my world"
        assert deltas[-1].finish_reason is finish
        assert deltas[-1].stop_reason is None


def test_stop_string_in_the_last_step_wins_over_length() -> None:
    deltas = play(choice(stop=("d",)), script("end", finish=FinishReason.LENGTH))
    assert (joined(deltas), deltas[-1].finish_reason) == ("en", FinishReason.STOP)


def test_stop_string_may_match_a_mark_that_the_end_brings() -> None:
    deltas = play(choice(stop=("\ufffd",)), [TokenStep((97, 0xF0), finish_reason="length")])  # type: ignore[arg-type]
    assert (joined(deltas), deltas[-1].stop_reason) == ("a", "\ufffd")


def test_min_tokens_keeps_earlier_text_whole() -> None:
    deltas = play(choice(stop=("ab",), min_tokens=3), script("ababab"))
    assert joined(deltas) == "abab"
    assert deltas[-1].stop_reason == "ab"


def test_min_tokens_text_is_never_cut_by_a_match_that_began_in_it() -> None:
    """The match would begin in token 3, which was released already, so it does not count."""
    deltas = play(choice(stop=("cd",), min_tokens=3), script("abcdecdx"))
    assert joined(deltas) == "abcde"


def test_held_back_tokens_leave_with_their_text() -> None:
    deltas = play(choice(stop=("bcd",)), script("abcx"))
    assert [delta.text for delta in deltas] == ["a", "", "", "bcx", ""]
    assert [delta.token_ids for delta in deltas[:4]] == [(97,), (), (), (98, 99, 120)]


def test_logprobs_are_finite_and_stay_with_their_tokens() -> None:
    """B018."""
    steps = [
        TokenStep((97,), (TokenLogprob(97, -math.inf, ((97, -0.5), (98, math.nan))),)),
        TokenStep((98,), (TokenLogprob(98, -1.5),), FinishReason.LENGTH),
    ]
    entries = [entry for delta in play(choice(logprobs=2), steps) for entry in delta.logprobs]
    assert entries[0] == TokenLogprob(97, -9999.0, ((97, -0.5), (98, -9999.0)))
    assert entries[1] == TokenLogprob(98, -1.5)


@given(
    ids=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    stop=st.lists(st.binary(min_size=1, max_size=3).map(lambda b: b.decode("latin-1")), max_size=3),
    min_tokens=st.integers(0, 5),
    cuts=st.lists(st.integers(1, 5), max_size=40),
)
def test_outcome_does_not_depend_on_the_steps(
    ids: list[int], stop: list[str], min_tokens: int, cuts: list[int]
) -> None:
    one_by_one = [TokenStep((token,)) for token in ids[:-1]]
    one_by_one.append(TokenStep((ids[-1],), finish_reason=FinishReason.LENGTH))
    grouped, rest = [], ids
    for cut in cuts:
        if len(rest) > cut:
            grouped.append(TokenStep(tuple(rest[:cut])))
            rest = rest[cut:]
    grouped.append(TokenStep(tuple(rest), finish_reason=FinishReason.LENGTH))
    outcomes = []
    for steps in (one_by_one, grouped):
        text = choice(stop=tuple(stop), min_tokens=min_tokens)
        deltas = play(text, steps)
        last = deltas[-1]
        outcomes.append(
            (joined(deltas), tokens(deltas), last.finish_reason, last.stop_reason, text.num_tokens)
        )
    assert outcomes[0] == outcomes[1]
