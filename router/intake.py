"""The one validator of both APIs: raw values in, requests that the spine can trust out.

Everything wrong with a request is found here, before it costs a worker anything, and named by the
path of its field.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.core.config import RouterConfig
from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.request import GenerateRequest
from kvferry.core.sampling import SamplingParams, parse_sampling

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenised on a thread; about 1 ms of work."""
MAX_BATCH_CHOICES = 1024
MAX_REQUEST_ID_CHARS = 128
_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._-]")


class TextCodec(Protocol):
    """What the router needs of a tokenizer. Every method is safe to call from a thread."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with whatever the tokenizer adds by default."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's turn.

        Raises InvalidRequest when the chat template is missing or refuses the messages.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt, validated and tokenised."""

    request: GenerateRequest
    text: str | None
    """As the client wrote it; None when it came as token ids."""

    @property
    def num_choices(self) -> int:
        return self.request.sampling.n


class Intake:
    """Makes PreparedPrompts. Holds no state of any request."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        model_name: str,
        max_model_len: int,
        config: RouterConfig,
        model_vocab_size: int | None = None,
    ) -> None:
        """``model_vocab_size``: rows of the embedding, where a tokenizer may know more ids."""
        self.codec = codec
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = min(codec.vocab_size, model_vocab_size or codec.vocab_size)
        self._config = config

    def check_model(self, name: Any) -> None:
        """None and "" ask for the one model that is served. Raises InvalidRequest, UnknownModel."""
        if name is None or name == "":
            return
        if not isinstance(name, str):
            raise InvalidRequest("model", "must be a string")
        if name != self.model_name:
            raise UnknownModel(
                "model", f"{name[:100]!r} is not served here; use {self.model_name!r}"
            )

    async def completion(
        self, prompt: Any, sampling: Mapping[str, Any], deadline_s: float | None = None
    ) -> list[PreparedPrompt]:
        """``prompt``: text, token ids, or a list of either. Raises InvalidRequest."""
        params = self._params(sampling)
        batch = _batch(prompt)
        if len(batch) * params.n > MAX_BATCH_CHOICES:
            raise InvalidRequest(
                "prompt", f"prompts times n must not be more than {MAX_BATCH_CHOICES}"
            )
        prepared = []
        for path, one in batch:
            if isinstance(one, str):
                token_ids = await self.encode(one, path)
            else:
                token_ids = self.check_token_ids(one, path)
            request = self._request(token_ids, params, path, deadline_s)
            text = one if isinstance(one, str) else None
            prepared.append(PreparedPrompt(request=request, text=text))
        return prepared

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        deadline_s: float | None = None,
    ) -> PreparedPrompt:
        """``messages``: of a shape that the API has checked. Raises InvalidRequest."""
        params = self._params(sampling)
        token_ids = await self.encode_chat(messages)
        request = self._request(token_ids, params, "messages", deadline_s)
        return PreparedPrompt(request=request, text="")

    async def encode(self, text: str, path: str) -> list[int]:
        """Tokens of a text that must not be empty. Raises InvalidRequest."""
        if not text:
            raise InvalidRequest(path, "must not be empty")
        check_unicode(text, path)
        if len(text) <= LONG_TEXT_CHARS:
            return self.codec.encode(text)
        return await asyncio.to_thread(self.codec.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation. Raises InvalidRequest."""
        if sum(len(message["content"]) for message in messages) <= LONG_TEXT_CHARS:
            return self.codec.encode_chat(messages)
        return await asyncio.to_thread(self.codec.encode_chat, messages)

    def check_token_ids(self, token_ids: Sequence[Any], path: str) -> list[int]:
        """Refuse anything but whole numbers inside the vocabulary. Raises InvalidRequest."""
        for i, token in enumerate(token_ids):
            if type(token) is not int:
                raise InvalidRequest(f"{path}[{i}]", "must be a token id, a whole number")
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"{path}[{i}]", f"token id must be in [0, {self.vocab_size})")
        return list(token_ids)

    def _params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        params = parse_sampling(dict(sampling))
        params.check_vocabulary(self.vocab_size)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return params.model_copy(update={"seed": seed})

    def _request(
        self, token_ids: list[int], params: SamplingParams, path: str, deadline_s: float | None
    ) -> GenerateRequest:
        if not token_ids:
            raise InvalidRequest(path, "must not be empty: it has no tokens")
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequest(path, f"has token {max(token_ids)}, which the model does not know")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise InvalidRequest(
                path,
                f"has {len(token_ids)} tokens; the context of {self.max_model_len} tokens "
                "must also hold at least one output token",
            )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = min(room, self._config.default_max_tokens or room)
        elif max_tokens > room:
            raise InvalidRequest(
                "max_tokens",
                f"{max_tokens} output tokens do not fit: the prompt has {len(token_ids)} tokens "
                f"and the context is {self.max_model_len}, which leaves {room}",
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                "min_tokens", f"must not be greater than max_tokens, here {max_tokens}"
            )
        return GenerateRequest(
            prompt_token_ids=tuple(token_ids),
            sampling=params.model_copy(update={"max_tokens": max_tokens}),
            deadline_s=self._config.request_timeout_s if deadline_s is None else deadline_s,
        )


def check_unicode(text: str, path: str) -> None:
    """Refuse lone surrogates: JSON can spell them. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(path, "must be valid Unicode: it holds a lone surrogate") from None


def safe_request_id(given: str) -> str:
    """What is echoed of a client's request id: safe characters, bounded length, maybe nothing."""
    return _UNSAFE_IN_ID.sub("", given[:MAX_REQUEST_ID_CHARS])


def _batch(prompt: Any) -> list[tuple[str, str | list[Any]]]:
    """Each prompt with the path of its field. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", "must be a text, a list of token ids, or a list of these")
    if not prompt:
        raise InvalidRequest("prompt", "must not be empty")
    if not any(isinstance(one, str | list) for one in prompt):
        return [("prompt", prompt)]
    for i, one in enumerate(prompt):
        if not isinstance(one, str | list):
            raise InvalidRequest(f"prompt[{i}]", "must be a text or a list of token ids")
        if not one:
            raise InvalidRequest(f"prompt[{i}]", "must not be empty")
    return [(f"prompt[{i}]", one) for i, one in enumerate(prompt)]
