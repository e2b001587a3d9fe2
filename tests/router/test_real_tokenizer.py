"""The text path with the tokenizer of the embedded default model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core.config import EMBEDDED_MODEL, RouterConfig
from kvferry.core.errors import InvalidRequest
from kvferry.models.load import resolve
from kvferry.models.tokenizer import Tokenizer
from kvferry.router.detokenizer import Detokenizer
from kvferry.router.intake import Intake

pytestmark = pytest.mark.model

TEXTS = [
    "The capital of France is Paris.",
    "caf\u00e9 \u4f60\u597d\uff0c\u4e16\u754c end",
    "\U0001f389\U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "def f(x):\n    return {'a': x}\n\n\n",
    "  two  spaces, don't  'clean' , up .",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve(EMBEDDED_MODEL, torch.float32))


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, is_text: bool) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, prompt_is_text=is_text)
    return "".join(detokenizer.feed(token) for token in ids) + detokenizer.finish()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["Hi", "The answer is: ", "\u4f60"])
def test_text_comes_back(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = tokenizer.encode(text)
    assert stream(tokenizer, tokenizer.encode(prompt), ids, is_text=True) == text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    prompt = tokenizer.encode("Hello")
    whole = tokenizer.decode([*prompt, *ids])
    assert stream(tokenizer, prompt, ids, is_text=True) == whole.removeprefix("Hello")


def test_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    """Fault B022, on a character of several tokens."""
    text = "Look: \U0001f9a9"
    ids = tokenizer.encode(text)
    cut = next(k for k in range(1, 4) if tokenizer.decode(ids[:-k]).endswith("\ufffd"))
    assert stream(tokenizer, ids[:-cut], ids[-cut:], is_text=False).strip() == "\U0001f9a9"


async def test_chat_has_its_special_tokens_once(tokenizer: Tokenizer) -> None:
    """Fault B033, and the intake with a real tokenizer."""
    intake = Intake(tokenizer, model_name="m", max_model_len=8192, config=RouterConfig())
    prompt = await intake.chat([{"role": "user", "content": "Hi"}], {})
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    ids = prompt.request.prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    with pytest.raises(InvalidRequest, match="token id must be in"):
        await intake.completion([tokenizer.vocab_size], {})
