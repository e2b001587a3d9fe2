"""One step, one representation: a ragged batch.

Each sequence contributes ``query_len >= 1`` tokens after ``context_len`` tokens that are already in
the paged cache. Chunked prefill and decode are the same batch. Plain numpy: planning never touches
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(slots=True)
class LogitEdits:
    """Changes to the logits of one sampled row; only rows that ask for any have an entry.

    ``prompt_ids`` and ``output_ids`` are the tokens before the one to sample.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    """Tokens that must not be sampled now: stop tokens before min_tokens."""
    prompt_ids: Int32 | None = None
    output_ids: Int32 | None = None


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters of the sampled rows, one array element per row [num_sampled].

    The noise of a row is keyed by (seed, sample_index, position) and the vocabulary id alone.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seed: NDArray[np.uint64]
    sample_index: Int32
    position: Int64
    """Absolute position of the token to sample."""
    edits: dict[int, LogitEdits] = field(default_factory=dict)
    """Row -> edits."""
    logprobs: dict[int, int] = field(default_factory=dict)
    """Row -> number of top log-probabilities wanted (0: only the sampled token's)."""

    @classmethod
    def greedy(cls, count: int) -> SamplingRows:
        """Rows that take the likeliest token, at position 0: no noise is drawn."""
        return cls(
            temperature=np.zeros(count, np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint64),
            sample_index=np.zeros(count, np.int32),
            position=np.zeros(count, np.int64),
        )


def no_moves() -> Int32:
    return np.zeros((0, 2), np.int32)


@dataclass(slots=True)
class StepPlan:
    """What the runner executes: first the moves of whole blocks, then the tokens. Either may be
    missing.
    """

    step: int
    token_ids: Int64
    """[num_tokens], sequence after sequence."""
    query_lens: Int32
    """[num_seqs]"""
    context_lens: Int32
    """[num_seqs]"""
    block_tables: Int32
    """[num_seqs, max_blocks]; entries past a sequence's own blocks are unspecified."""
    sampled: Int32
    """[num_sampled] indexes into the sequences, rising: those whose last position is sampled."""
    sampling: SamplingRows
    swap_out: Int32 = field(default_factory=no_moves)
    """[n, 2] (block, host slot), done first: to be kept while others use the block."""
    swap_in: Int32 = field(default_factory=no_moves)
    """[n, 2] (host slot, block), done next."""
    copies: Int32 = field(default_factory=no_moves)
    """[n, 2] (source block, target block), done last: a block that its sharers part with."""

    @property
    def has_moves(self) -> bool:
        return bool(len(self.swap_out) or len(self.swap_in) or len(self.copies))


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities of one sampled row, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    """What a step yields."""

    token_ids: Int64
    """[num_sampled]"""
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    """Row -> log-probabilities, for the rows that asked."""
    invalid: tuple[int, ...] = ()
    """Rows whose logits were not finite: their token means nothing, their neighbours' does."""


LayerDone = Callable[[int, object], None]
"""(layers, event): the KV of the running step is in the cache in its first ``layers`` layers, and
that of all earlier steps in all layers, once ``event`` of the device has passed; None: it is.
"""


class Runner(Protocol):
    """Executes steps. The paged cache it writes is shared with the KV plane."""

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        """Run one step and wait for its tokens. ``layer_done`` is called on this thread, for 0
        layers first and then after each one.
        """
        ...
