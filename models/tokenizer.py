"""Text to token ids and back, for the router. Never imports torch.

Two ways in. Plain text takes the tokenizer's own default for special tokens. A chat takes its
special tokens from the chat template alone, so that a template that starts with the BOS does not
get a second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from kvferry.core.errors import InvalidRequest, ModelLoadError

TOKENIZER_FILE = "tokenizer.json"
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Tokenizer:
    """The tokenizer of a ready Hugging Face folder. Safe to use from several threads at once."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelLoadError(
                f"{path}: file is missing; copy the checkpoint's tokenizer files into this folder"
            )
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the Rust parser raises bare Exception
            raise ModelLoadError(f"{path}: cannot be read: {error}") from None
        # The wrapper switches truncation and padding on this object between calls; left alone it is
        # never written to and may be used by any number of threads.
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer has: valid ids are [0, vocab_size). Embedding rows beyond it are
        padding.
        """
        return len(self._tokenizer)

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.bos_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens this tokenizer adds by default."""
        return list(self._backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        ``template`` is handed to the chat template (``tools``, ``add_generation_prompt`` and so
        on). Raises InvalidRequest when there is no template or the template refuses the messages.
        """
        text = self.render_chat(messages, **template)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """The text a conversation becomes. Raises InvalidRequest as encode_chat does."""
        if not self.has_chat_template:
            raise InvalidRequest(
                "messages", "this model has no chat template; use the completions API"
            )
        values = {"add_generation_prompt": True, **template}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **values)
        except _TEMPLATE_ERRORS as error:
            # A template is a program: what it cannot digest is the client's to change.
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from None
        return str(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that do not form a character yet decode to U+FFFD."""
        ids = list(token_ids)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id; None for an id it does not have."""
        token: str | None = self._backend.id_to_token(token_id)
        return token
