"""The numbers of all sequences on a worker: one array per quantity, one row per sequence.

Kept in arrays, a step's bookkeeping is a handful of numpy operations however many sequences run.
What only few rows have is kept by row, so that a step none of them is in asks one question.
Rows are lent to sequences and taken back; nothing here touches tensors or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.ids import AttemptKey
from kvferry.engine.plan import Int32, Int64, SamplingRows, StepPlan
from kvferry.proto import worker_pb2 as pb

Rows = NDArray[np.int64]

STOP_IDS_IN_TABLE = 4
"""Few requests have more stop token ids; for those the rules ask the request itself."""


class SequenceTable:
    """Rows for at most ``max_rows`` sequences of at most ``max_model_len`` tokens."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """``eos_token_ids`` end every answer that does not ignore them."""
        self.eos_token_ids = eos_token_ids
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.tokens: Int32 = np.zeros((max_rows, max_model_len), "<i4")
        self._token_bytes = self.tokens.data.cast("B")
        self.blocks: Int32 = np.zeros((max_rows, max_blocks), np.int32)
        self.num_blocks: Int32 = np.zeros(max_rows, np.int32)
        self.length: Int64 = np.zeros(max_rows, np.int64)
        """Known tokens: prompt and output so far."""
        self.computed: Int64 = np.zeros(max_rows, np.int64)
        """Tokens whose KV is in the cache."""
        self.prompt_len: Int64 = np.zeros(max_rows, np.int64)
        self.max_length: Int64 = np.zeros(max_rows, np.int64)
        self.min_length: Int64 = np.zeros(max_rows, np.int64)
        self.guaranteed = np.zeros(max_rows, np.bool_)
        """Rows that keep their blocks to the end: they were given back once already."""
        num_stop_ids = STOP_IDS_IN_TABLE + len(eos_token_ids)
        self.stop_ids: Int32 = np.full((num_stop_ids, max_rows), -1, np.int32)
        """Column r: the tokens that end row r; -1 where it has fewer."""
        self.more_stop_ids: dict[int, frozenset[int]] = {}
        """Of the rows with more stop token ids than a column holds: all."""
        self.edited = np.zeros(max_rows, np.bool_)
        """Rows whose every sampling needs more than arrays say: logit edits, log-probabilities."""
        self.special: set[int] = set()
        """These, and the rows with min_tokens."""
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k: Int32 = np.zeros(max_rows, np.int32)
        self.top_p = np.zeros(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.sample_index: Int32 = np.zeros(max_rows, np.int32)
        self.num_samples: dict[int, int] = {}
        """Rows that sample several tokens next, of as many sample indexes: first ones alone."""
        self.router = np.zeros(max_rows, np.uint64)
        self.request = np.zeros(max_rows, np.uint64)
        self.attempt: Int32 = np.zeros(max_rows, np.int32)
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_lent(self) -> int:
        return self.max_rows - len(self._free)

    def lend(self, key: AttemptKey, spec: pb.SequenceSpec) -> int:
        """Take a free row and fill it from ``spec``; the caller has checked that both fit."""
        row = self._free.pop()
        sampling = spec.sampling
        length = len(spec.token_ids)
        self.router[row], self.request[row], self.attempt[row] = key
        self.tokens[row, :length] = np.asarray(spec.token_ids)
        self.length[row] = length
        self.computed[row] = 0
        self.num_blocks[row] = 0
        self.prompt_len[row] = spec.prompt_len
        self.max_length[row] = min(spec.prompt_len + sampling.max_tokens, self.max_model_len)
        self.min_length[row] = spec.prompt_len + sampling.min_tokens
        self.guaranteed[row] = spec.given_back > 0
        self._set_stop_ids(row, sampling)
        self.edited[row] = is_edited = _is_edited(sampling)
        if is_edited or sampling.min_tokens:
            self.special.add(row)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.sample_index[row] = sampling.sample_index
        if spec.num_samples > 1:
            self.num_samples[row] = spec.num_samples
        return row

    def _set_stop_ids(self, row: int, sampling: pb.Sampling) -> None:
        own = sampling.stop_token_ids
        if len(own) > STOP_IDS_IN_TABLE:
            self.more_stop_ids[row] = frozenset(own)
        stop_ids = [*own[:STOP_IDS_IN_TABLE], *(() if sampling.ignore_eos else self.eos_token_ids)]
        self.stop_ids[:, row] = -1
        self.stop_ids[: len(stop_ids), row] = stop_ids

    def bytes_of_block(self, row: int, index: int) -> memoryview:
        """The tokens of a full block of a row."""
        start = (row * self.max_model_len + index * self.block_size) * 4
        return self._token_bytes[start : start + self.block_size * 4]

    def give_back(self, row: int) -> None:
        self.num_blocks[row] = 0
        self.more_stop_ids.pop(row, None)
        self.special.discard(row)
        self.num_samples.pop(row, None)
        self._free.append(row)

    def set_blocks(self, row: int, blocks: Sequence[int]) -> None:
        """The row's whole block table."""
        self.blocks[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def add_blocks(self, rows: Rows, blocks: Sequence[int]) -> None:
        """One more block for each of ``rows``, which are distinct."""
        self.blocks[rows, self.num_blocks[rows]] = blocks
        self.num_blocks[rows] += 1

    def append(self, rows: Rows, positions: Int64, token_ids: Int64) -> None:
        """One new token for each row; ``positions`` are the lengths of the rows so far."""
        self.tokens[rows, positions] = token_ids
        self.length[rows] = positions + 1
        if self.num_samples:
            for row in rows.tolist():
                self.num_samples.pop(row, None)

    def append_one(self, row: int, token_id: int) -> None:
        """One new token whose predecessors all have KV."""
        length = int(self.length[row])
        self.tokens[row, length] = token_id
        self.length[row] = length + 1
        self.num_samples.pop(row, None)

    def sample_counts(self, rows: Rows) -> Int32 | None:
        """Tokens to sample next of each row; None: one of each, as almost always."""
        if not self.num_samples:
            return None
        return np.array([self.num_samples.get(row, 1) for row in rows.tolist()], np.int32)

    def lacking_block(self, rows: Rows, pending: NDArray[np.bool_] | int = 0) -> Rows:
        """Those of ``rows`` whose next token has no block to be written to; those ``pending`` have
        a token more than is known of yet.
        """
        lengths = self.length[rows] + pending
        lacking: Rows = rows[self.num_blocks[rows] * self.block_size < lengths]
        return lacking


def build_plan(table: SequenceTable, step: int, rows: Rows, query_lens: Int32) -> StepPlan:
    """The ragged batch in which ``rows[i]`` computes its next ``query_lens[i]`` tokens.

    A row is sampled when its last known token is among them, once for each of its samples. Logit
    edits and log-probabilities are the caller's to add.
    """
    context = table.computed[rows]
    ends = context + query_lens
    sampled = (ends == table.length[rows]).nonzero()[0]
    drawn = rows if sampled.size == rows.size else rows[sampled]
    counts = table.sample_counts(drawn)
    max_blocks = -(-int(ends.max()) // table.block_size) if rows.size else 0
    return StepPlan(
        step=step,
        token_ids=_next_tokens(table, rows, context, query_lens),
        query_lens=query_lens,
        context_lens=context.astype(np.int32),
        block_tables=table.blocks[rows, :max_blocks],
        sampled=(sampled if counts is None else np.repeat(sampled, counts)).astype(np.int32),
        sampling=_sampling_rows(table, drawn, counts),
    )


def build_ahead(
    table: SequenceTable, step: int, rows: Rows, pending: NDArray[np.bool_]
) -> StepPlan:
    """The step in which each row decodes its next token, while the one before it computes: those
    ``pending`` are in that one, and what it yields is their input. ``fill_ahead`` brings it.
    """
    context = table.computed[rows] + pending
    sampling = _sampling_rows(table, rows, None)
    sampling.position += pending
    return StepPlan(
        step=step,
        token_ids=np.zeros(len(rows), np.int64),
        query_lens=np.ones(len(rows), np.int32),
        context_lens=context.astype(np.int32),
        block_tables=table.blocks[rows, : -(-int(context.max() + 1) // table.block_size)],
        sampled=np.arange(len(rows), dtype=np.int32),
        sampling=sampling,
    )


def fill_ahead(table: SequenceTable, rows: Rows, plan: StepPlan) -> None:
    """The tokens of a step that was built ahead, all of which are known by now."""
    plan.token_ids[:] = table.tokens[rows, plan.context_lens]


def _next_tokens(table: SequenceTable, rows: Rows, context: Int64, query_lens: Int32) -> Int64:
    """The next ``query_lens[i]`` tokens of each row: most rows have one, few have many."""
    ends = query_lens.cumsum()
    token_ids = np.empty(int(ends[-1]) if ends.size else 0, np.int64)
    token_ids[ends - query_lens] = table.tokens[rows, context]
    for i in (query_lens > 1).nonzero()[0].tolist():
        begin, count = int(context[i]), int(query_lens[i])
        token_ids[ends[i] - count : ends[i]] = table.tokens[rows[i], begin : begin + count]
    return token_ids


def within_groups(counts: Int32) -> Int32:
    """0, 1, ... counts[i] - 1 of each group after the other."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(starts, counts).astype(np.int32)


def _sampling_rows(table: SequenceTable, rows: Rows, counts: Int32 | None) -> SamplingRows:
    """One per sample of each row: they differ in the sample index alone."""
    sample_index = table.sample_index[rows]
    if counts is not None:
        sample_index = np.repeat(sample_index, counts) + within_groups(counts)
        rows = np.repeat(rows, counts)
    return SamplingRows(
        temperature=table.temperature[rows],
        top_k=table.top_k[rows],
        top_p=table.top_p[rows],
        min_p=table.min_p[rows],
        seed=table.seed[rows],
        sample_index=sample_index,
        position=table.length[rows],
    )


def _is_edited(sampling: pb.Sampling) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or sampling.HasField("logprobs")
    )
