"""What sampling on a device takes and gives.

R rows of logits, V vocabulary ids, Q sequences. Ragged lists are values and offsets: those of row i
are ``values[offsets[i] : offsets[i + 1]]``. Every tensor is contiguous and on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_DRAFTS = 15
"""Drafted tokens of one sequence that are verified at once."""
MAX_TOP_LOGPROBS = 20

IN_PROMPT = -(2**31)
"""Top bit of an entry of the token counts: the id is in the prompt. Below it stands how often the
id is in the output.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedIds:
    """Vocabulary ids per row; ids outside the vocabulary are ignored."""

    ids: torch.Tensor
    """int32 [N]"""
    offsets: torch.Tensor
    """int32 [R + 1]"""
    values: torch.Tensor | None = None
    """float32 [N], where ids come with a number. An id is at most once in a row then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties per row from the counts of a slot, [R] each but ``counts``."""

    counts: torch.Tensor
    """int32 [num_slots, V], kept by ``add_tokens``; all zero is a new sequence."""
    slot: torch.Tensor
    """int32; negative: a row without penalties."""
    repetition: torch.Tensor
    """float32; 1 is none."""
    frequency: torch.Tensor
    """float32; 0 is none."""
    presence: torch.Tensor
    """float32; 0 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditTensors:
    """Changes to logits before sampling; None: no row has any."""

    penalties: Penalties | None = None
    bias: RaggedIds | None = None
    """Ids with values."""
    banned: RaggedIds | None = None
    """Ids that must not be sampled."""
    allowed_bits: torch.Tensor | None = None
    """int32 [R, ceil(V / 32)]: bit ``id % 32`` of word ``id // 32`` is 0 for an id that a grammar
    forbids (the layout of llguidance and XGrammar).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters, [R] each."""

    temperature: torch.Tensor
    """float32; 0 is greedy."""
    top_k: torch.Tensor
    """int32; 0 keeps all."""
    top_p: torch.Tensor
    """float32; 1 keeps all."""
    min_p: torch.Tensor
    """float32; 0 keeps all."""
    seed: torch.Tensor
    """int64: the bits of an unsigned integer."""
    sample_index: torch.Tensor
    """int32"""
    position: torch.Tensor
    """int64: absolute position of the token to sample."""
    filtered: bool = True
    """False promises, where the host knows, that no row has top-k, top-p or min-p: the search for
    thresholds is then left out, with the same result.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One token per row."""

    token_ids: torch.Tensor
    """int64 [R]"""
    invalid: torch.Tensor
    """bool [R]: the row's logits were not finite and its token, 0, means nothing."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SampledTokens:
        """To be filled by a kernel."""
        return cls(
            token_ids=torch.empty(rows, dtype=torch.int64, device=device),
            invalid=torch.empty(rows, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """Log-probabilities of M rows under the model's own distribution."""

    chosen: torch.Tensor
    """float32 [M]: of the row's token."""
    ids: torch.Tensor
    """int32 [M, n], falling in probability, the lowest id first among equals."""
    values: torch.Tensor
    """float32 [M, n]"""

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> TopLogprobs:
        """To be filled by a kernel."""
        return cls(
            chosen=torch.empty(rows, dtype=torch.float32, device=device),
            ids=torch.empty(rows, count, dtype=torch.int32, device=device),
            values=torch.empty(rows, count, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTensors:
    """Drafts of Q sequences, laid out as the rows of their logits.

    A sequence with d drafts has d + 1 rows: row j holds the logits after the first j drafts, and
    verifies draft j; the last, the bonus row, has no draft.
    """

    offsets: torch.Tensor
    """int32 [Q + 1] into the R rows."""
    token_ids: torch.Tensor
    """int64 [R]: the draft of each row, anything in bonus rows."""
    probs: torch.Tensor | None = None
    """float32 [R, V]: what each draft was drawn from, bonus rows not read. None: drafts were
    certain (an n-gram, a greedy draft model), which is probability 1 at the draft.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTokens:
    """What verification keeps of Q sequences."""

    num_accepted: torch.Tensor
    """int32 [Q]: drafts that are kept."""
    token_ids: torch.Tensor
    """int64 [Q, MAX_DRAFTS + 1]: the kept drafts, then the one token that follows them, then 0."""
    invalid: torch.Tensor
    """bool [Q]: the logits after the kept drafts were not finite; the token after them is 0 and
    means nothing.
    """

    @classmethod
    def empty(cls, sequences: int, device: torch.device) -> VerifiedTokens:
        """To be filled by a kernel."""
        return cls(
            num_accepted=torch.empty(sequences, dtype=torch.int32, device=device),
            token_ids=torch.empty(sequences, MAX_DRAFTS + 1, dtype=torch.int64, device=device),
            invalid=torch.empty(sequences, dtype=torch.bool, device=device),
        )
