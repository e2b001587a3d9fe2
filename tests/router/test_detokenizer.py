"""Incremental text equals whole text, whatever the tokens; prompt text never comes again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_engine import EOS, TURN, ByteCodec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.detokenizer import MARK, WINDOW_LIMIT, Detokenizer, prompt_text

EMOJI = "\U0001f389"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TEXTS = [
    "",
    "plain",
    "caf\u00e9 na\u00efve",
    EMOJI * 30,
    FAMILY * 9,
    "\u4f60\u597d" * 40,
    "a" * 500,
]
texts = st.text(st.characters(exclude_characters=MARK, exclude_categories=("Cs",)), max_size=80)
token_ids = st.lists(st.integers(0, 259), max_size=80)


class SentencePieceCodec:
    """Words begin with a space, which is dropped at the start of a text; other bytes fall back.

    A run of byte tokens that is not whole UTF-8 decodes to one mark per byte, as in Llama 2.
    """

    words = ("\u2581the", "\u2581cat", "s", ".", "\u2581", "\u2581sat")

    def decode(self, token_ids: Sequence[int]) -> str:
        text, run = "", bytearray()
        for token in [*token_ids, -1]:
            if 0 <= token < 256:
                run.append(token)
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += MARK * len(run)
            run.clear()
            text += self.words[token - 256] if token >= 256 else ""
        return text.replace("\u2581", " ").removeprefix(" ")


class CountingCodec(ByteCodec):
    """Counts tokens decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def stream(codec: object, prompt: list[int], ids: list[int], *, is_text: bool = True) -> list[str]:
    detokenizer = Detokenizer(codec, prompt, prompt_is_text=is_text)  # type: ignore[arg-type]
    return [*(detokenizer.feed(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    pieces = stream(ByteCodec(), [72, 105], list(text.encode()))
    assert "".join(pieces) == text
    assert MARK not in "".join(pieces)


@given(prompt=texts, text=texts)
def test_any_text(prompt: str, text: str) -> None:
    assert "".join(stream(ByteCodec(), list(prompt.encode()), list(text.encode()))) == text


@given(ids=token_ids)
def test_any_tokens(ids: list[int]) -> None:
    """Also those that are no UTF-8 at all, and special ones."""
    assert "".join(stream(ByteCodec(), [72, 105], ids)) == ByteCodec().decode([72, 105, *ids])[2:]


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0x80, 0xFF), min_size=WINDOW_LIMIT, max_size=3 * WINDOW_LIMIT))
def test_tokens_that_never_make_a_character(ids: list[int]) -> None:
    pieces = stream(ByteCodec(), [72, 105], ids)
    assert "".join(pieces) == ByteCodec().decode([72, 105, *ids])[2:]
    assert any(pieces[:-1]), "marks are not held back for ever"


@pytest.mark.parametrize("before", range(2 * WINDOW_LIMIT))
def test_a_character_across_the_end_of_a_full_window(before: int) -> None:
    """Bytes that are no characters fill the window; the emoji after them stays whole."""
    ids = [*[0x80] * before, *EMOJI.encode()]
    assert "".join(stream(ByteCodec(), [72], ids)) == MARK * before + EMOJI


def test_a_character_comes_once_and_whole() -> None:
    assert stream(ByteCodec(), [72], [*EMOJI.encode(), 33]) == ["", "", "", EMOJI, "!", ""]


def test_an_incomplete_end_becomes_a_mark() -> None:
    assert stream(ByteCodec(), [72], [65, *EMOJI.encode()[:2]]) == ["A", "", "", MARK]


def test_special_tokens_have_no_text() -> None:
    assert "".join(stream(ByteCodec(), [72], [EOS, 65, TURN, 66, EOS])) == "AB"
    assert "".join(stream(ByteCodec(), [TURN], [TURN] * 100 + [65])) == "A"


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("before", ["plain text ", EMOJI * 5, "", "\u4f60" * 9])
def test_prompt_that_ends_inside_a_character(before: str, cut: int) -> None:
    """Fault B022."""
    head, rest = EMOJI.encode()[:cut], EMOJI.encode()[cut:]
    prompt = [*before.encode(), *head]
    assert prompt_text(ByteCodec(), prompt) == before
    completed = stream(ByteCodec(), prompt, [*rest, *b" more"], is_text=False)
    assert "".join(completed) == f"{EMOJI} more"
    dropped = stream(ByteCodec(), prompt, [*b"more"], is_text=False)
    assert "".join(dropped) == f"{MARK}more"
    assert "".join(stream(ByteCodec(), prompt, [], is_text=False)) == MARK


@given(prompt=texts.filter(bool), text=texts)
def test_prompt_text_never_comes_again(prompt: str, text: str) -> None:
    ids = list(prompt.encode())
    assert "".join(stream(ByteCodec(), ids, list(text.encode()), is_text=False)) == text


def test_space_before_the_first_word() -> None:
    codec = SentencePieceCodec()
    assert "".join(stream(codec, [256], [257, 258, 261, 259])) == " cats sat."
    assert "".join(stream(codec, [256, 257], [258] * 40 + [261] * 40)) == "s" * 40 + " sat" * 40


@given(text=texts, words=st.lists(st.integers(256, 261), max_size=20))
def test_byte_fallback(text: str, words: list[int]) -> None:
    codec = SentencePieceCodec()
    ids = [*words, *text.encode(), *words]
    if "\u2581" not in text:
        assert "".join(stream(codec, [256], ids)) == codec.decode([256, *ids])[3:]


@pytest.mark.parametrize("byte", [65, 0x80, EOS])
def test_cost_per_token_is_bounded(byte: int) -> None:
    codec = CountingCodec()
    stream(codec, [72] * 50_000, [byte] * 1000)
    assert codec.decoded <= 2 * WINDOW_LIMIT * 1001
