"""A byte-level tokenizer and a scripted engine: what the router's APIs need, without a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.request import FinishReason, GenerateRequest, Timeline, TokenLogprob, TokenStep
from kvferry.proto import kvferry_pb2
from kvferry.router.siblings import Siblings

BOS, EOS, TURN = 256, 257, 258
VOCAB_SIZE = 260
SPECIAL = {BOS: "<bos>", EOS: "<eos>", TURN: "<turn>", 259: "<unused>"}
MODEL = "fake-model"
MAX_MODEL_LEN = 200
ANSWER = " Paris, caf\u00e9 \U0001f389!"


class ByteCodec:
    """One token per UTF-8 byte; plain text gets no BOS, a chat exactly one."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise InvalidRequest("messages", "the chat template refused them: user must be last")
        ids = [BOS]
        for message in messages:
            ids += [TURN, *f"{message['role']}:{message['content']}\n".encode()]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text, run = "", bytearray()
        for token in token_ids:
            if token < BOS:
                run.append(token)
            elif not skip_special_tokens:
                text += run.decode(errors="replace") + SPECIAL[token]
                run.clear()
        return text + run.decode(errors="replace")


@dataclass
class Hold:
    """A step that does not come before ``release`` is set."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)


Script = Iterable["TokenStep | KvferryError | Exception | Hold"]


def script(
    text: str, *, finish: FinishReason = FinishReason.STOP, max_tokens: int = 10**6
) -> list[TokenStep]:
    """One token per step; STOP adds the EOS token as real workers do."""
    tokens = list(text.encode())[:max_tokens]
    if len(tokens) == max_tokens:
        finish = FinishReason.LENGTH
    elif finish is FinishReason.STOP:
        tokens.append(EOS)
    steps = [TokenStep((token,)) for token in tokens[:-1]]
    return [*steps, TokenStep((tokens[-1],), finish_reason=finish)]


def default_script(request: GenerateRequest, sample_index: int) -> Script:
    assert request.sampling.max_tokens is not None
    steps = script(ANSWER, max_tokens=request.sampling.max_tokens)
    if request.sampling.logprobs is None:
        return steps
    return [with_logprobs(step, request.sampling.logprobs) for step in steps]


def with_logprobs(step: TokenStep, num_top: int) -> TokenStep:
    """The second of the top tokens is impossible: its log-probability is -inf."""
    top = ((step.token_ids[0], -0.5), (65, -math.inf))[:num_top]
    return TokenStep(
        step.token_ids, (TokenLogprob(step.token_ids[0], -0.5, top),), step.finish_reason
    )


class FakeEngine:
    """Plays ``script(request, sample_index)`` and keeps count of what runs."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.running = 0
        self._changed = asyncio.Event()
        self.reset()

    def reset(self) -> None:
        """As new, for the next test. Nothing may run."""
        assert self.running == 0
        self.script: Callable[[GenerateRequest, int], Script] = default_script
        self.not_ready = ""
        self.requests.clear()
        self.closed_early = 0

    async def generate(
        self,
        request: GenerateRequest,
        sample_index: int,
        timeline: Timeline,
        siblings: Siblings | None = None,
    ) -> AsyncGenerator[TokenStep, None]:
        self.requests.append(request)
        self.running += 1
        self._changed.set()
        ended = False
        timeline.queue_s, timeline.ttft_s, timeline.decode_s = 0.001, 0.02, 0.1
        timeline.prefill_s, timeline.transfer_bytes = 0.01, 4096
        timeline.cached_tokens_prefill = 2
        try:
            for item in self.script(request, sample_index):
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Hold):
                    item.reached.set()
                    await item.release.wait()
                    continue
                await asyncio.sleep(0)
                ended = item.finish_reason is not None
                yield item
        finally:
            self.running -= 1
            self.closed_early += not ended
            self._changed.set()

    async def until_running(self, num_choices: int) -> None:
        """Wait until exactly so many choices run."""
        async with asyncio.timeout(5):
            while self.running != num_choices:
                self._changed.clear()
                await self._changed.wait()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self.until_running(0)

    def status(self) -> kvferry_pb2.StatusResponse:
        ready, reason = self.ready()
        return kvferry_pb2.StatusResponse(
            model=MODEL, ready=ready, reason=reason, running=self.running
        )

    def ready(self) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready
