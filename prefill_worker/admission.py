"""Whether a prompt may come in now. Pure.

A prompt is taken only with all its blocks, and with less than one full step of work before it, as
prompts are ordered:
whatever waits longer waits in the router's queue, where another worker can still take it (design:
section 2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptAdmission:
    """The limits of one prefill worker."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_batch_tokens: int

    def never_fits(self, prompt_len: int) -> str | None:
        """Why a prompt could not be computed even on an empty worker, or None."""
        if prompt_len < 1:
            return "an empty prompt has no position to sample after"
        if prompt_len >= self.max_model_len:
            return f"prompt of {prompt_len} tokens leaves no room in {self.max_model_len}"
        if -(-prompt_len // self.block_size) > self.num_blocks:
            return f"prompt of {prompt_len} tokens needs more than all {self.num_blocks} blocks"
        return None

    def has_look_ahead(self, tokens_before: int) -> bool:
        """Whether one more prompt may wait behind ``tokens_before`` tokens still to compute."""
        return tokens_before < self.max_batch_tokens
