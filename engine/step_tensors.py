"""A step's plan as the tensors that the model and its attention take.

Shapes: S num_seqs, T num_tokens, R num_sampled. All index arithmetic is vectorised over sequences
and tokens: this runs in every step, beside the scheduler.

Sequences with up to SHORT_QUERY_LEN tokens stand before longer ones, in the plan's order otherwise:
attention computes the two kinds differently. Sampled rows keep the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvferry.engine.plan import Int32, Int64, StepPlan
from kvferry.kernels.flash_decoding.splits import MAX_QUERY_LEN
from kvferry.kernels.upload import uploaded

SHORT_QUERY_LEN = MAX_QUERY_LEN
"""Tokens of a sequence that decodes or verifies a draft, at most."""


@dataclass(slots=True, eq=False)
class StepTensors:
    """Tensors on the device, and the numpy arrays from which attention plans its work."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: where each token's K and V are written."""
    sampled_tokens: torch.Tensor
    """int64 [R]: indexes into the T tokens whose hidden states get logits."""
    query_starts: Int64
    """[S + 1]: tokens query_starts[s] : query_starts[s + 1] belong to sequence s."""
    context_lens: Int32
    """[S]"""
    block_tables: Int32
    """[S, max_blocks]"""
    num_short: int
    """The first so many sequences have up to SHORT_QUERY_LEN tokens."""

    @classmethod
    def build(cls, plan: StepPlan, block_size: int, device: torch.device | str) -> StepTensors:
        return StepArrays.of(plan, block_size).on(device)


@dataclass(slots=True, eq=False)
class StepArrays:
    """The same, still on the host: int64 where ``StepTensors`` has tensors."""

    token_ids: Int64
    positions: Int64
    slots: Int64
    sampled_tokens: Int64
    query_starts: Int64
    context_lens: Int32
    block_tables: Int32
    num_short: int

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> StepArrays:
        plan, num_short = _short_first(plan)
        num_seqs = len(plan.query_lens)
        query_starts = np.zeros(num_seqs + 1, dtype=np.int64)
        plan.query_lens.cumsum(dtype=np.int64, out=query_starts[1:])
        positions = np.arange(len(plan.token_ids), dtype=np.int64)
        positions += (plan.context_lens - query_starts[:-1]).repeat(plan.query_lens)
        tables = plan.block_tables
        first_entries = np.arange(0, tables.size, tables.shape[1]).repeat(plan.query_lens)
        blocks = positions // block_size
        slots = positions + (tables.take(first_entries + blocks) - blocks) * block_size
        return cls(
            token_ids=plan.token_ids,
            positions=positions,
            slots=slots,
            sampled_tokens=query_starts[1:][plan.sampled] - 1,
            query_starts=query_starts,
            context_lens=plan.context_lens,
            block_tables=plan.block_tables,
            num_short=num_short,
        )

    def on(self, device: torch.device | str) -> StepTensors:
        return StepTensors(
            token_ids=uploaded(self.token_ids, device),
            positions=uploaded(self.positions, device),
            slots=uploaded(self.slots, device),
            sampled_tokens=uploaded(self.sampled_tokens, device),
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            num_short=self.num_short,
        )


def _short_first(plan: StepPlan) -> tuple[StepPlan, int]:
    """The same step with its short sequences before the others, and how many these are."""
    is_long = plan.query_lens > SHORT_QUERY_LEN
    num_short = len(is_long) - int(np.count_nonzero(is_long))
    if is_long[num_short:].all():
        return plan, num_short
    order = np.argsort(is_long, kind="stable")
    query_lens = plan.query_lens[order]
    starts = np.cumsum(plan.query_lens, dtype=np.int64) - plan.query_lens
    new_starts = np.cumsum(query_lens, dtype=np.int64) - query_lens
    tokens = np.arange(len(plan.token_ids)) + np.repeat(starts[order] - new_starts, query_lens)
    ordered = replace(
        plan,
        token_ids=plan.token_ids[tokens],
        query_lens=query_lens,
        context_lens=plan.context_lens[order],
        block_tables=plan.block_tables[order],
        sampled=np.argsort(order)[plan.sampled].astype(np.int32),
    )
    return ordered, num_short


def token_slots(block_tables: Int32, lengths: Int64, block_size: int) -> Int64:
    """Slots of the first ``lengths[s]`` tokens of each sequence, [S, max(lengths)].

    Entries past a sequence's length repeat its last slot: whoever reads them reads the sequence's
    own values, so that a mask makes them harmless whatever other blocks hold.
    """
    longest = int(lengths.max())
    starts = block_tables[:, : -(-longest // block_size), None].astype(np.int64) * block_size
    slots: Int64 = (starts + np.arange(block_size)).reshape(len(lengths), -1)[:, :longest]
    last = slots[np.arange(len(lengths)), lengths - 1]
    padding = np.arange(longest) >= lengths[:, None]
    np.copyto(slots, last[:, None], where=padding)
    return slots
