"""Shows an answer while it streams, and keeps it whole for JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.core.request import TextDelta, Timeline, Usage


@dataclass(slots=True)
class Answer:
    """One finished choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    timeline: Timeline | None = None
    usage: Usage | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": None if self.usage is None else _usage_json(self.usage),
            "timeline": None if self.timeline is None else asdict(self.timeline),
        }


async def read_answer(
    deltas: AsyncIterator[TextDelta], show: Callable[[str], None] = lambda text: None
) -> Answer:
    """Collect the first choice of a stream; ``show`` gets each piece of text as it comes."""
    answer = Answer()
    async for delta in deltas:
        if delta.index != 0:
            continue
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        if delta.text:
            show(delta.text)
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason.value
            answer.timeline = delta.timeline
    return answer


def _usage_json(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
