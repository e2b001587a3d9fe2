"""What the router's two APIs hand to its spine, and what comes back.

Text becomes tokens before this and tokens become text after it; the spine sees only these types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a choice ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One validated prompt. The router's intake has filled in the seed and max_tokens."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float | None = None
    """Seconds from arrival until the request is stopped; None: no deadline of its own."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token, of the distribution before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class TokenStep:
    """Tokens of one choice as they leave a worker."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Where one choice's time went: seconds, each span measured by one process's own clock."""

    queue_s: float = 0.0
    """In the router's queue, until a (prefill, decode) pair was chosen."""
    reserve_s: float = 0.0
    prefill_wait_s: float = 0.0
    """On the prefill worker, before its first chunk ran."""
    prefill_s: float = 0.0
    """From the start of the first chunk to the first token."""
    transfer_bytes: int = 0
    """KV that was scattered on the decode worker, resends included."""
    transfer_scatter_s: float = 0.0
    """What that took: bytes / seconds is the rate of the scatters."""
    transfer_wall_s: float = 0.0
    """On the decode worker, from the first offer to the last scatter. With layer-wise push it runs
    beside the prompt's computation.
    """
    transfer_exposed_s: float = 0.0
    """Part of the transfer that nothing hid: from the first token known to decode ready."""
    ttft_s: float = 0.0
    decode_s: float = 0.0
    """From the first to the last token, seen by the router."""
    prompt_tokens: int = 0
    cached_tokens_prefill: int = 0
    cached_tokens_decode: int = 0
    output_tokens: int = 0
    attempts: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    transfer_transport: str = ""
    """How KV moved; empty: it did not."""
    transfer_packed_bytes: int = 0
    """KV that was packed on the prefill worker, resends included, as far as that said so before the
    last token.
    """
    transfer_pack_s: float = 0.0
    transfer_wire_s: float = 0.0
    """Bytes in flight, summed over slabs."""
    transfer_credit_s: float = 0.0
    """Bytes were ready, and the decode worker had no memory for them yet."""
    transfer_resends: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return self.decode_s / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def scatter_gb_per_s(self) -> float:
        seconds = self.transfer_scatter_s
        return self.transfer_bytes / seconds / 1e9 if seconds else 0.0

    @property
    def pack_gb_per_s(self) -> float:
        seconds = self.transfer_pack_s
        return self.transfer_packed_bytes / seconds / 1e9 if seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one choice adds to the client's stream."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that matched, if one did."""
    timeline: Timeline | None = None
    """Set on the delta that ends the choice."""


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request, as the OpenAI API reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    by_choice: dict[int, int] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
