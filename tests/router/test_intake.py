"""Good input: what the intake makes of it. Bad input is tested through both APIs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fake_engine import BOS, MAX_MODEL_LEN, MODEL, ByteCodec
from router_under_test import fake_intake

from kvferry.core.config import RouterConfig
from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.router.intake import LONG_TEXT_CHARS, Intake, safe_request_id


class ThreadNotingCodec(ByteCodec):
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode_chat(messages)


async def test_text(intake: Intake) -> None:
    (prompt,) = await intake.completion("Hi", {"max_tokens": 3, "seed": 5})
    assert prompt.text == "Hi"
    assert prompt.request.prompt_token_ids == (72, 105)
    assert (prompt.request.sampling.max_tokens, prompt.request.sampling.seed) == (3, 5)
    assert prompt.request.deadline_s == 600.0


async def test_token_ids_have_no_text(intake: Intake) -> None:
    (prompt,) = await intake.completion([BOS, 72], {}, deadline_s=2.5)
    assert prompt.text is None
    assert prompt.request.prompt_token_ids == (BOS, 72)
    assert prompt.request.deadline_s == 2.5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "bc"], [(97,), (98, 99)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([[1], "a"], [(1,), (97,)]),
        ([7], [(7,)]),
    ],
)
async def test_batches(intake: Intake, prompt: Any, expected: list[tuple[int, ...]]) -> None:
    prompts = await intake.completion(prompt, {})
    assert [one.request.prompt_token_ids for one in prompts] == expected


async def test_a_seed_is_drawn_when_there_is_none(intake: Intake) -> None:
    drawn = {(await intake.completion("x", {}))[0].request.sampling.seed for _ in range(3)}
    assert len(drawn) == 3
    assert None not in drawn


async def test_default_output_limit_is_the_room(intake: Intake) -> None:
    (prompt,) = await intake.completion("x" * (MAX_MODEL_LEN - 1), {})
    assert prompt.request.sampling.max_tokens == 1
    limited = fake_intake(RouterConfig(default_max_tokens=7))
    (prompt,) = await limited.completion("x", {})
    assert prompt.request.sampling.max_tokens == 7
    (prompt,) = await limited.completion("x" * (MAX_MODEL_LEN - 3), {})
    assert prompt.request.sampling.max_tokens == 3


async def test_a_limit_that_just_fits(intake: Intake) -> None:
    (prompt,) = await intake.completion("x" * 150, {"max_tokens": 50})
    assert prompt.request.sampling.max_tokens == 50
    with pytest.raises(InvalidRequest, match=r"max_tokens: 51 .* leaves 50"):
        await intake.completion("x" * 150, {"max_tokens": 51})


async def test_min_tokens_above_the_default_limit(intake: Intake) -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: .* here 1"):
        await intake.completion("x" * (MAX_MODEL_LEN - 1), {"min_tokens": 2})


async def test_long_texts_leave_the_event_loop_free() -> None:
    codec = ThreadNotingCodec()
    intake = Intake(codec, model_name=MODEL, max_model_len=10**6, config=RouterConfig())
    here = threading.current_thread()
    await intake.completion("x" * LONG_TEXT_CHARS, {})
    await intake.chat([{"role": "user", "content": "x"}], {})
    assert codec.threads == [here, here]
    await intake.completion("x" * (LONG_TEXT_CHARS + 1), {})
    await intake.chat([{"role": "user", "content": "x" * (LONG_TEXT_CHARS + 1)}], {})
    assert here not in codec.threads[2:]


async def test_a_lone_surrogate_is_no_text(intake: Intake) -> None:
    with pytest.raises(InvalidRequest, match="prompt: must be valid Unicode"):
        await intake.completion("a\ud800", {})
    with pytest.raises(InvalidRequest, match=r"stop\[1\]: .*unicode"):
        await intake.completion("a", {"stop": ["b", "\udfff"]})


def test_model(intake: Intake) -> None:
    for name in (MODEL, "", None):
        intake.check_model(name)
    with pytest.raises(UnknownModel):
        intake.check_model("other")
    with pytest.raises(UnknownModel) as caught:
        intake.check_model("x" * 10_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("given", "echoed"), [("", ""), ("ok-1._", "ok-1._"), ("a\r\nb: c", "abc"), ("\u00e9/", "")]
)
def test_request_ids(given: str, echoed: str) -> None:
    assert safe_request_id(given) == echoed


async def test_tokens_that_the_model_lacks_are_refused_however_they_come() -> None:
    """A tokenizer may know more ids than the embedding has rows."""
    intake = Intake(
        ByteCodec(),
        model_name=MODEL,
        max_model_len=100,
        config=RouterConfig(),
        model_vocab_size=100,
    )
    for prompt, where in (("z", "prompt"), ([121], "prompt[0]")):
        with pytest.raises(InvalidRequest) as refused:
            await intake.completion(prompt, {})
        assert refused.value.field == where
    with pytest.raises(InvalidRequest, match="messages"):
        await intake.chat([{"role": "user", "content": "a"}], {})
    assert await intake.completion("A", {})
