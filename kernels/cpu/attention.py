"""Rotation, the write of keys and values, and attention over the paged cache, in float32.

A step's queries are cut into spans, each a task for one thread: some queries of one sequence over
some heads of keys. How they are cut changes no result.

Shapes: T tokens of a step, S sequences, Hq and Hkv heads, G = Hq / Hkv, D head_dim, N num_blocks,
B block_size.
"""

from __future__ import annotations

import ctypes
from ctypes import addressof, byref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.cpu.library import Attention, Batch, Cache, CpuOps, Rotation
from kvferry.kernels.cpu.rows import LEAST_SHARED
from kvferry.kernels.kv_layer import KvLayer

MOST_HEAD_DIM = 256
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
"""Of caches; in the order of ``types.h``."""
SPAN = np.dtype([(name, np.int32) for name in (
    "seq", "query", "num_queries", "position", "head", "num_heads",
)])  # fmt: skip
MOST_ROWS = 192
"""Queries times heads that a span has, but for single tokens of very many heads."""
_TILE, _MOST_TILE_ROWS, _LANES = 64, 14, 16
"""As in ``types.h``."""


def is_read(kv: KvLayer) -> bool:
    """Whether such a cache is written and read here."""
    return (
        kv.k.dtype in TYPES
        and kv.head_dim % _LANES == 0
        and kv.head_dim <= MOST_HEAD_DIM
        and kv.k.stride(3) == 1
        and kv.k.stride() == kv.v.stride()
    )


def cut_into_spans(
    query_starts: NDArray[np.int64],
    context_lens: NDArray[np.int32],
    num_kv_heads: int,
    group: int,
    workers: int,
) -> NDArray[np.void]:
    """Spans of a step's S sequences, one share for each worker after the other, of about the same
    work, the longest first. query_starts [S + 1], context_lens [S].

    Sequences with few tokens are one span, whose keys are read in the order of memory, unless there
    are too few of them for the workers: then each head is one.
    """
    query_lens = np.diff(query_starts)
    at_once = max(1, MOST_ROWS // group)
    pieces = -(-query_lens // at_once)
    seqs = np.repeat(np.arange(len(query_lens)), pieces)
    first = (np.arange(len(seqs)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * at_once
    spans = np.zeros(len(seqs), SPAN)
    spans["seq"], spans["query"] = seqs, query_starts[seqs] + first
    spans["num_queries"] = np.minimum(query_lens[seqs] - first, at_once)
    spans["position"] = context_lens[seqs] + first
    spans["num_heads"] = num_kv_heads
    rows = int(query_lens.max(initial=1)) * num_kv_heads * group
    if rows > MOST_ROWS or len(spans) < 2 * workers:
        spans = np.repeat(spans, num_kv_heads)
        spans["head"] = np.tile(np.arange(num_kv_heads), len(seqs))
        spans["num_heads"] = 1
    keys = spans["position"].astype(np.int64) + spans["num_queries"]
    work: NDArray[np.int64] = keys * spans["num_heads"]
    order = np.argsort(-work, kind="stable")
    return spans[np.concatenate([order[i::workers] for i in range(workers)])]


@dataclass(slots=True, eq=False)
class StepBatch:
    """A step's tokens, cut into spans, with the memory that attention over them takes. All layers
    share it.
    """

    call: ctypes.Structure
    kept: list[object]
    """What the call's pointers lead to."""
    workers: int
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(
        cls,
        query_starts: NDArray[np.int64],
        context_lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        slots: torch.Tensor,
        kv: KvLayer,
        group: int,
        workers: int,
    ) -> StepBatch:
        """slots int64 [T]: where each token's keys and values go; a negative one is left out.
        Raises IndexError for a block or slot that is not in the cache.
        """
        spans = cut_into_spans(query_starts, context_lens, kv.num_kv_heads, group, workers)
        lengths = np.diff(query_starts) + context_lens
        used = np.arange(tables.shape[1]) < -(-lengths // kv.block_size)[:, None]
        if ((tables < 0) | (tables >= len(kv.k)))[used].any():
            raise IndexError(f"tables: a block is outside the cache of {len(kv.k)}")
        if len(slots) and int(slots.max()) >= len(kv.k) * kv.block_size:
            raise IndexError(f"slots: one is outside the cache of {len(kv.k)} blocks")
        rows = int((spans["num_queries"] * spans["num_heads"]).max(initial=0)) * group
        floats = 2 * _TILE * kv.head_dim + _MOST_TILE_ROWS * _TILE + rows * (2 * kv.head_dim + 2)
        scratch = torch.empty(workers, -(-floats // _LANES) * _LANES)
        tables, slots = np.ascontiguousarray(tables, np.int32), slots.contiguous()
        call = Batch(
            tokens=len(slots),
            slots=slots.data_ptr(),
            spans=spans.ctypes.data,
            num_spans=len(spans),
            tables=tables.ctypes.data,
            table_stride=tables.shape[1],
            scratch=scratch.data_ptr(),
            scratch_stride=scratch.stride(0),
        )
        return cls(call, [spans, tables, slots, scratch], workers)

    def rotate_by(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """cos, sin: float32 [T, R / 2], of each token's position."""
        cos, sin = self.rotation = cos.contiguous(), sin.contiguous()
        self.call.cos, self.call.sin = cos.data_ptr(), sin.data_ptr()


def cache_of(kv: KvLayer) -> ctypes.Structure:
    """A layer's cache as the library takes it; good while its tensors are."""
    cache: ctypes.Structure = Cache(
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        None if kv.k_scale is None else kv.k_scale.data_ptr(),
        None if kv.v_scale is None else kv.v_scale.data_ptr(),
        *kv.k.stride()[:3],
        kv.block_size,
        kv.num_kv_heads,
        kv.head_dim,
        TYPES.index(kv.k.dtype),
    )
    return cache


def rotate_and_keep(
    ops: CpuOps,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cache: ctypes.Structure,
    batch: StepBatch,
) -> torch.Tensor:
    """``rope_kv_write`` into a ``cache_of``: the rotated q [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D], each token's heads contiguous; the batch has its rotation.
    norms: weights [D] of q's and k's, and their eps.
    """
    q = qkv[0]
    assert batch.rotation is not None, "rotate_by comes first"
    out = torch.empty(q.shape)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    call = Rotation(
        addressof(batch.call),
        *(x.data_ptr() for x in qkv),
        *(x.stride(0) for x in qkv),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        out.data_ptr(),
        addressof(cache),
        q.shape[1],
        batch.rotation[0].shape[1],
        eps,
    )
    ops.rotate(byref(call), ops.lanes, batch.workers if q.numel() >= LEAST_SHARED else 1)
    return out


def attend(ops: CpuOps, q: torch.Tensor, cache: ctypes.Structure, batch: StepBatch) -> torch.Tensor:
    """Causal attention of q [T, Hq, D], contiguous, over a ``cache_of``: [T, Hq, D]."""
    out = torch.empty_like(q)
    _, num_heads, head_dim = q.shape
    call = Attention(
        addressof(batch.call),
        q.data_ptr(),
        out.data_ptr(),
        addressof(cache),
        num_heads // cache.heads,
        head_dim**-0.5,
    )
    ops.attention(byref(call), ops.lanes, batch.workers)
    return out
