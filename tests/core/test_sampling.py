from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import SamplingParams, parse_sampling

NAN = float("nan")


def test_defaults_sample_from_the_plain_distribution() -> None:
    params = parse_sampling({})
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.n == 1
    assert params.max_tokens is None


def test_lists_become_tuples_and_whole_numbers_are_accepted_as_floats() -> None:
    params = parse_sampling({"stop": ["\n", "END"], "stop_token_ids": [2], "temperature": 0})
    assert params.stop == ("\n", "END")
    assert params.stop_token_ids == (2,)
    assert params.temperature == 0.0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": NAN}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", 7]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"logit_bias": {5: 101.0}}, "logit_bias.5"),
        ({"logit_bias": {5: 1e9}}, "logit_bias.5"),
        ({"logit_bias": {5: NAN}}, "logit_bias.5"),
        ({"logit_bias": {5: None}}, "logit_bias.5"),
        ({"logit_bias": {"abc": 1.0}}, "logit_bias.abc"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_a_wrong_value_names_its_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_sampling(values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias.100"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias.-1"),
        (SamplingParams(stop_token_ids=(0, 100)), "stop_token_ids[1]"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest, match=r"\[0, 100\)") as caught:
        params.check_vocabulary(100)
    assert caught.value.field == field


def test_token_ids_inside_the_vocabulary_pass() -> None:
    SamplingParams(logit_bias={0: -100.0, 99: 100.0}, stop_token_ids=(99,)).check_vocabulary(100)
