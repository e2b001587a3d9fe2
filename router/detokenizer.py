"""Tokens to text, one token at a time, right for characters that span tokens.

NOTE: a token's text depends on its neighbours: several tokens may make one character, and
sentencepiece tokenizers drop the space at the very start of a text. So a short window of the last
tokens, which begins with the end of the prompt, is decoded again for each token, and what was not
sent yet is the new text. Replacement marks at the end of the window may be the start of a character
that later tokens complete; they are held back until they change, until text follows them, or until
the window is full. The window is cut where decoding its tail gives the tail of its text, so each
token costs one decode of at most ``WINDOW_LIMIT`` tokens.

A prompt of token ids may end inside a character. Its pending bytes belong to the output: completed
by the first tokens, or shown once as a replacement mark. Nothing else of the prompt is ever
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MARK = "\ufffd"
CONTEXT_TOKENS = 6
WINDOW_TOKENS = 12
WINDOW_LIMIT = 24
MAX_PENDING_MARKS = 3
"""A character has at most four bytes, so at most three can wait for the last."""


class Decodes(Protocol):
    """The one thing the detokenizer needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens left out."""
        ...


def prompt_text(codec: Decodes, token_ids: Sequence[int]) -> str:
    """Text of a prompt of token ids, without the bytes of a character it leaves unfinished."""
    text = codec.decode(token_ids)
    return text[: len(text) - _pending_marks(text)]


class Detokenizer:
    """Incremental detokenisation of one choice."""

    __slots__ = ("_codec", "_sent", "_text", "_window")

    def __init__(self, codec: Decodes, prompt: Sequence[int], *, prompt_is_text: bool) -> None:
        """``prompt_is_text``: the prompt came as text, so it cannot end inside a character."""
        self._codec = codec
        self._window, self._text = _context(codec, prompt)
        self._sent = len(self._text) - (0 if prompt_is_text else _pending_marks(self._text))

    def feed(self, token_id: int) -> str:
        """The text that is sure after this token; "" while a character is incomplete."""
        self._window.append(token_id)
        self._text = self._codec.decode(self._window)
        sure = len(self._text.rstrip(MARK))
        if sure < len(self._text) and len(self._window) >= WINDOW_LIMIT:
            sure = len(self._text) - 1
        new = self._text[self._sent : sure]
        self._sent = max(self._sent, sure)
        if len(self._window) >= WINDOW_TOKENS:
            self._cut()
        return new

    def finish(self) -> str:
        """The rest, when no more tokens come: a character left incomplete shows as a mark."""
        rest = self._text[self._sent :]
        self._sent = len(self._text)
        return rest

    def _cut(self) -> None:
        unsent = len(self._text) - self._sent
        if unsent and len(self._window) < WINDOW_LIMIT:
            return
        window, text = _context(self._codec, self._window)
        if self._text.endswith(text) or len(self._window) >= WINDOW_LIMIT:
            self._window, self._text = window, text
            self._sent = max(0, len(text) - unsent)


def _context(codec: Decodes, token_ids: Sequence[int]) -> tuple[list[int], str]:
    """The last few tokens, starting at a character where possible, and their text."""
    text = ""
    window: list[int] = []
    for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_PENDING_MARKS + 1):
        window = list(token_ids[-size:])
        text = codec.decode(window)
        if not text.startswith(MARK) or size >= len(token_ids):
            break
    return window, text


def _pending_marks(text: str) -> int:
    return min(len(text) - len(text.rstrip(MARK)), MAX_PENDING_MARKS)
