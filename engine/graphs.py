"""Decode and verification steps as CUDA graphs: launched at once, whatever they consist of.

A graph replays kernels with the addresses and grids that it was captured with. So

* there is one per *bucket* of sequences and of tokens per sequence, powers of two both;
* a step's numbers go into static tensors, of which a bucket uses the first rows;
* rows that pad a bucket are tokens of no sequence: attention skips them, they are written to no
  slot, and their logits are left out;
* what depends on lengths is computed on the device, in the graph (``flash_decoding.splits``).

All graphs share one memory pool: a step's logits are good until the next step is launched. Steps
with longer chunks, or with more sequences than the largest bucket, run as they come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.kernel_attention import DecodeInputs
from kvferry.engine.step_tensors import StepArrays
from kvferry.kernels.launch import next_power_of_2
from kvferry.kernels.upload import uploaded

log = logging.getLogger(__name__)


class Bucket(NamedTuple):
    """Room for ``num_seqs`` sequences of up to ``query_len`` tokens."""

    num_seqs: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.query_len


def buckets_for(max_seqs: int, max_query_len: int = 1) -> list[Bucket]:
    """Powers of two up to those that hold the largest step, the largest first: smaller graphs then
    fit in the memory that the pool has.
    """
    seqs, lens = (
        [2**i for i in range(next_power_of_2(most).bit_length())]
        for most in (max_seqs, max_query_len)
    )
    found = [Bucket(num_seqs, query_len) for num_seqs in seqs for query_len in lens]
    return sorted(found, key=lambda bucket: (-bucket.num_tokens, -bucket.num_seqs))


@dataclass(slots=True, eq=False)
class StaticInputs:
    """Everything that a step of short sequences reads, at addresses that stay."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    sampled_tokens: torch.Tensor
    """int64 [S]"""
    attention: DecodeInputs

    @classmethod
    def allocate(
        cls, buckets: Sequence[Bucket], max_blocks: int, device: torch.device
    ) -> StaticInputs:
        """For the largest of ``buckets``, of sequences of up to ``max_blocks`` blocks."""
        num_tokens = max(bucket.num_tokens for bucket in buckets)
        num_seqs = max(bucket.num_seqs for bucket in buckets)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(num_tokens, dtype=torch.int64),
            positions=zeros(num_tokens, dtype=torch.int64),
            sampled_tokens=zeros(num_seqs, dtype=torch.int64),
            attention=DecodeInputs(
                slots=zeros(num_tokens, dtype=torch.int64) - 1,
                query_starts=zeros(num_seqs + 1, dtype=torch.int32),
                context_lens=zeros(num_seqs, dtype=torch.int32),
                block_tables=zeros(num_seqs, max_blocks, dtype=torch.int32),
            ),
        )

    def of(self, bucket: Bucket) -> StaticInputs:
        """The rows that a bucket uses, sharing memory."""
        tokens, seqs = slice(bucket.num_tokens), slice(bucket.num_seqs)
        attention = self.attention
        return StaticInputs(
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            sampled_tokens=self.sampled_tokens[seqs],
            attention=DecodeInputs(
                slots=attention.slots[tokens],
                query_starts=attention.query_starts[: bucket.num_seqs + 1],
                context_lens=attention.context_lens[seqs],
                block_tables=attention.block_tables[seqs],
            ),
        )

    def clear(self) -> None:
        """A step of no tokens."""
        for tensor in (self.attention.query_starts, self.attention.context_lens):
            tensor.zero_()
        self.attention.slots.fill_(-1)

    def fill(self, step: StepArrays) -> None:
        """The numbers of ``step`` and, behind them, rows of no sequence. Nothing waits for the
        device: copies come behind the step before.
        """
        self.fill_ahead(step)
        self.fill_tokens(step)

    def fill_tokens(self, step: StepArrays) -> None:
        """What is known last."""
        _fill(self.token_ids, step.token_ids, 0)

    def fill_ahead(self, step: StepArrays) -> None:
        """All but that."""
        attention = self.attention
        _fill(self.positions, step.positions, 0)
        _fill(self.sampled_tokens, step.sampled_tokens, 0)
        _fill(attention.slots, step.slots, -1)
        _fill(attention.query_starts, step.query_starts, int(step.query_starts[-1]))
        _fill(attention.context_lens, step.context_lens, 0)
        # Other entries of the tables belong to no key that a row sees.
        num_seqs, num_blocks = step.block_tables.shape
        tables = attention.block_tables[:num_seqs, :num_blocks]
        tables.copy_(uploaded(step.block_tables, tables.device))


class Captured(Protocol):
    """A graph."""

    @property
    def output(self) -> torch.Tensor:
        """Filled by each replay."""
        ...

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], torch.Tensor]], Captured]
"""Records what a function launches, and where its result comes to lie."""
Progress = Callable[[int, int], None]
"""(graphs captured, graphs in all)"""


def log_progress(done: int, total: int) -> None:
    """A bar in the log, a line for each quarter."""
    if done * 4 // total > (done - 1) * 4 // total:
        filled = done * 20 // total
        log.info("CUDA graphs [%s] %d of %d", "#" * filled + "." * (20 - filled), done, total)


class DecodeGraphs:
    """The graphs of one runner. Without ``capture_all`` there are none, and every step is eager."""

    def __init__(
        self,
        run: Callable[[StaticInputs, int], torch.Tensor],
        buckets: Sequence[Bucket],
        max_blocks: int,
        device: torch.device,
    ) -> None:
        """``run``: launches a step of static inputs of up to so many tokens per sequence, and
        returns the logits [S, V] of their sampled rows.
        """
        self._run = run
        self._buckets = buckets
        self._inputs = StaticInputs.allocate(buckets, max_blocks, device)
        self._graphs: dict[Bucket, Captured] = {}
        self._prepared: StepArrays | None = None
        """What the static inputs hold, but for its token ids."""

    def capture_all(self, capture: Capture, progress: Progress) -> None:
        """One graph per bucket, of a step of no tokens: what it launches is the same."""
        self._inputs.clear()
        for number, bucket in enumerate(self._buckets, 1):
            inputs = self._inputs.of(bucket)
            self._graphs[bucket] = capture(partial(self._run, inputs, bucket.query_len))
            progress(number, len(self._buckets))

    def bucket_of(self, step: StepArrays) -> Bucket | None:
        """The smallest that holds ``step``; None where it has to run as it comes."""
        num_seqs = len(step.context_lens)
        # A prompt whose end is short may be sampled several times.
        if step.num_short < num_seqs or len(step.sampled_tokens) > num_seqs:
            return None
        longest = int(np.diff(step.query_starts).max())
        bucket = Bucket(next_power_of_2(num_seqs), next_power_of_2(longest))
        return bucket if bucket in self._graphs else None

    def prepare(self, step: StepArrays) -> None:
        """Fill in what is known of the step that may be launched next: all but its token ids."""
        bucket = self.bucket_of(step)
        if bucket is not None:
            self._inputs.of(bucket).fill_ahead(step)
            self._prepared = step

    def logits(self, step: StepArrays) -> torch.Tensor | None:
        """Launch ``step``: [R, V], until the next launch. None: it has to run as it comes."""
        bucket = self.bucket_of(step)
        if bucket is None:
            return None
        inputs = self._inputs.of(bucket)
        if self._prepared is step:
            inputs.fill_tokens(step)
        else:
            inputs.fill(step)
        self._prepared = None
        graph = self._graphs[bucket]
        graph.replay()
        return graph.output[: len(step.sampled_tokens)]


def _fill(target: torch.Tensor, values: NDArray[np.integer], padding: int) -> None:
    padded = np.full(len(target), padding, np.int64 if target.dtype is torch.int64 else np.int32)
    padded[: len(values)] = values
    target.copy_(uploaded(padded, target.device))
