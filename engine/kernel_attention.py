"""Attention over the paged cache by kernels that read it through the block table.

Shapes: T tokens of a step, S sequences, Hq and Hkv heads, D head_dim.

A step's sequences stand in two groups (StepTensors puts the short ones first): up to
SHORT_QUERY_LEN new tokens go to flash_decoding, more go to flash_attention. Which group a sequence
is in depends on itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.plan import Int32
from kvferry.engine.step_tensors import StepTensors
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_attention.workspace import Workspace
from kvferry.kernels.flash_decoding.splits import INVARIANT_SPLIT, SplitPlan
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.launch import chip_of, next_power_of_2
from kvferry.kernels.ops import Ops
from kvferry.kernels.upload import uploaded
from kvferry.models.decoder import Attend, Heads


@dataclass(slots=True, eq=False)
class DecodeInputs:
    """What the attention of S short sequences reads of a step, on the device."""

    slots: torch.Tensor
    """int64 [T]; -1 where nothing is written."""
    query_starts: torch.Tensor
    """int32 [S + 1]"""
    context_lens: torch.Tensor
    """int32 [S]"""
    block_tables: torch.Tensor
    """int32 [S, blocks]"""


class KernelAttention:
    """Makes the ``attend`` callback of each step; split plans are kept, one per bucket.

    Prefill converts a quantised cache in a workspace that holds the longest sequence. A step that
    needs more is computed in groups of sequences: how a row is computed never depends on others.
    """

    def __init__(
        self,
        kv: PagedKV,
        ops: Ops,
        num_heads: int,
        max_model_len: int,
        dtype: torch.dtype,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]
        self._ops = ops
        self._num_heads = num_heads
        self._max_model_len = max_model_len
        self._invariant_split = INVARIANT_SPLIT if batch_invariant else None
        self._split_plans: dict[tuple[int, int], SplitPlan] = {}
        self._workspace: Workspace | None = None
        if not self._layers[0].is_quantised and kv.dtype is not dtype:
            raise ValueError(f"kv: queries of {dtype} read no cache of {kv.dtype}")
        if self._layers[0].is_quantised:
            self._workspace = Workspace.allocate(
                min(max_model_len, kv.num_blocks * kv.block_size),
                num_kv_heads=kv.num_kv_heads,
                head_dim=kv.head_dim,
                dtype=dtype,
                device=kv.tensor.device,
            )

    def __call__(self, tensors: StepTensors) -> Attend:
        """Plan one step. The callback is valid until the next call."""
        num_short, starts = tensors.num_short, tensors.query_starts
        parts = []
        if num_short:
            parts.append(self._decoding(tensors, int(starts[num_short])))
        parts += [self._prefill(tensors, seqs) for seqs in self._prefill_groups(tensors)]

        return self._attend(tensors.slots, parts)

    def decoding(self, inputs: DecodeInputs, max_query_len: int) -> Attend:
        """The callback of a step of short sequences alone, all of whose numbers are on the device
        already: no more than kernels are launched, here and in the callback. Rows of no sequence
        come out as anything.
        """
        plan = self._split_plan(len(inputs.context_lens), max_query_len)
        self._ops.plan_splits(inputs.context_lens, inputs.query_starts, plan)
        return self._attend(inputs.slots, [self._short_part(inputs, plan, len(inputs.slots))])

    def _attend(self, slots: torch.Tensor, parts: list[_Part]) -> Attend:
        def attend(layer: int, heads: Heads) -> torch.Tensor:
            kv = self._layers[layer]
            norms = heads.q_norm, heads.k_norm, heads.eps
            q = self._ops.rope_kv_write(
                heads.q, heads.k, heads.v, heads.cos, heads.sin, slots, kv, *norms
            )
            out = torch.empty_like(q)
            for part in parts:
                part(q, kv, out)
            return out

        return attend

    def _decoding(self, tensors: StepTensors, num_tokens: int) -> _Part:
        """Attention of the short sequences, in the bucket that holds them."""
        num_seqs = tensors.num_short
        longest = int(np.diff(tensors.query_starts[: num_seqs + 1]).max())
        plan = self._split_plan(num_seqs, longest)
        padding = plan.num_seqs - num_seqs
        device = self._layers[0].k.device
        # Padding rows have no tokens, and block 0 as their table, which nothing reads.
        starts = np.pad(tensors.query_starts[: num_seqs + 1], (0, padding), mode="edge")
        inputs = DecodeInputs(
            slots=tensors.slots,
            query_starts=uploaded(starts.astype(np.int32), device),
            context_lens=uploaded(_padded(tensors.context_lens[:num_seqs], padding), device),
            block_tables=uploaded(_padded(tensors.block_tables[:num_seqs], padding), device),
        )
        self._ops.plan_splits(inputs.context_lens, inputs.query_starts, plan)
        return self._short_part(inputs, plan, num_tokens)

    def _short_part(self, inputs: DecodeInputs, plan: SplitPlan, num_tokens: int) -> _Part:
        def attend(q: torch.Tensor, kv: KvLayer, out: torch.Tensor) -> None:
            self._ops.flash_decoding(
                q[:num_tokens],
                kv,
                inputs.block_tables,
                inputs.context_lens,
                inputs.query_starts,
                plan,
                scale=_scale(q),
                out=out[:num_tokens],
            )

        return attend

    def _prefill_groups(self, tensors: StepTensors) -> list[slice]:
        """The long sequences, those together whose keys and values the workspace holds."""
        begin, end = tensors.num_short, len(tensors.context_lens)
        if begin == end:
            return []
        if self._workspace is None:
            return [slice(begin, end)]
        query_lens = np.diff(tensors.query_starts)[begin:]
        groups = self._workspace.groups(query_lens, tensors.context_lens[begin:])
        return [slice(begin + group.start, begin + group.stop) for group in groups]

    def _prefill(self, tensors: StepTensors, seqs: slice) -> _Part:
        """Attention of some of the long sequences."""
        device = self._layers[0].k.device
        starts = tensors.query_starts[seqs.start : seqs.stop + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        lengths = np.diff(starts), tensors.context_lens[seqs]
        plan = PrefillPlan.of(*lengths, device=device)
        workspace = None if self._workspace is None else self._workspace.for_step(*lengths)
        query_starts = uploaded((starts - starts[0]).astype(np.int32), device)
        context_lens = uploaded(tensors.context_lens[seqs].copy(), device)
        tables = uploaded(tensors.block_tables[seqs].copy(), device)

        def attend(q: torch.Tensor, kv: KvLayer, out: torch.Tensor) -> None:
            self._ops.flash_attention(
                q[rows],
                kv,
                tables,
                query_starts,
                context_lens,
                plan,
                scale=_scale(q),
                workspace=workspace,
                out=out[rows],
            )

        return attend

    def _split_plan(self, num_seqs: int, max_query_len: int) -> SplitPlan:
        bucket = (next_power_of_2(num_seqs), next_power_of_2(max_query_len))
        if bucket not in self._split_plans:
            kv = self._layers[0]
            self._split_plans[bucket] = SplitPlan.for_bucket(
                *bucket,
                self._num_heads,
                kv,
                self._max_model_len,
                chip_of(kv.k.device),
                invariant_split=self._invariant_split,
            )
        return self._split_plans[bucket]


_Part = Callable[[torch.Tensor, KvLayer, torch.Tensor], None]
"""(q [T, Hq, D], layer, out [T, Hq, D]): fills its rows of ``out``."""


def _scale(q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _padded(rows: Int32, count: int) -> Int32:
    """``count`` more rows of zeros behind those given."""
    widths = [(0, count)] + [(0, 0)] * (rows.ndim - 1)
    return np.pad(rows, widths)
