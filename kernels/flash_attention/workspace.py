"""Where a prefill step keeps the keys and values of a layer once they are converted.

A key is read once per query head by each tile of query rows that sees it. Converted before that,
once per layer, keys cost attention no more than a float cache's, and lie in blocks that hold whole
tiles, which the tensor memory accelerator can move. All layers and steps of a stream use one
workspace in turn; what a step needs of it is known to the host when the step is planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.flash_attention.plan import Lengths
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.upload import uploaded

BLOCK_TOKENS = 128
"""A multiple of the keys of any tile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workspace:
    """Room for the keys and values of one layer. Contents are overwritten in every layer."""

    elements: torch.Tensor
    """[2, N, BLOCK_TOKENS, H, D] in the type of the queries, contiguous: keys, then values."""

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Workspace:
        """Room for any one sequence of ``num_tokens``."""
        shape = (2, _blocks_of(num_tokens), BLOCK_TOKENS, num_kv_heads, head_dim)
        return cls(elements=torch.empty(shape, dtype=dtype, device=device))

    @classmethod
    def nbytes_for(
        cls, num_tokens: int, *, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """What ``allocate`` will take, to be counted before a cache gets the rest of a memory."""
        elements = 2 * _blocks_of(num_tokens) * BLOCK_TOKENS * num_kv_heads * head_dim
        return elements * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return self.elements.shape[1]

    def groups(
        self, query_lens: Lengths, context_lens: Lengths, *, window: int | None = None
    ) -> list[slice]:
        """Consecutive sequences that fit together, as many as possible in each group.

        A step that exceeds the workspace is computed group by group. A sequence that exceeds it
        alone is a group of its own, which ``for_step`` refuses.
        """
        first, end = _blocks_read(query_lens, context_lens, window)
        groups: list[slice] = []
        begin = held = 0
        for seq, count in enumerate((end - first).tolist()):
            if seq > begin and held + count > self.num_blocks:
                groups.append(slice(begin, seq))
                begin, held = seq, 0
            held += count
        return [*groups, slice(begin, len(end))]

    def for_step(
        self, query_lens: Lengths, context_lens: Lengths, *, window: int | None = None
    ) -> StepWorkspace:
        """Where these sequences are unpacked to. Blocks before the first key that a query sees are
        left out. Raises ValueError when the workspace is too small.
        """
        first, end = _blocks_read(query_lens, context_lens, window)
        count = end - first
        if count.sum() > self.num_blocks:
            raise ValueError(
                f"workspace: holds {self.num_blocks} blocks of {BLOCK_TOKENS} tokens, and the step "
                f"reads {count.sum()}"
            )
        # Blocks follow each other in the workspace, sequence by sequence.
        shift = np.cumsum(count) - count - first
        seqs = np.repeat(np.arange(len(count)), count)
        first_token = (np.arange(len(seqs)) - shift[seqs]) * BLOCK_TOKENS
        num_tokens = np.asarray(query_lens) + np.asarray(context_lens)
        held = np.minimum(num_tokens[seqs] - first_token, BLOCK_TOKENS)
        width = int(end.max(initial=0))
        tables = np.maximum(0, np.arange(width) + shift[:, None])
        blocks = np.stack([seqs, first_token, held], axis=1)
        device = self.elements.device
        return StepWorkspace(
            elements=self.elements,
            blocks=uploaded(blocks.astype(np.int32), device),
            tables=uploaded(tables.astype(np.int32), device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWorkspace:
    """A workspace and what one step unpacks into it."""

    elements: torch.Tensor
    """[2, N, BLOCK_TOKENS, H, D]"""
    blocks: torch.Tensor
    """int32 [n, 3]: sequence, first token and number of tokens of the first n blocks in use."""
    tables: torch.Tensor
    """int32 [S, blocks]: block tables of the same sequences in the workspace."""

    @property
    def layer(self) -> KvLayer:
        """The workspace as attention reads it."""
        return KvLayer(*self.elements.unbind())


def _blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def _blocks_read(
    query_lens: Lengths, context_lens: Lengths, window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per sequence, the block of the first key that a query sees and the one after the last."""
    queries = np.asarray(query_lens, dtype=np.int64)
    contexts = np.asarray(context_lens, dtype=np.int64)
    before = np.zeros_like(contexts) if window is None else np.maximum(0, contexts - window + 1)
    return before // BLOCK_TOKENS, -(-(queries + contexts) // BLOCK_TOKENS)
