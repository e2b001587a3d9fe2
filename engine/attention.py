"""Attention over the paged cache on the CPU.

Shapes: T tokens of a step, B rows of a bucket, L keys, Hq and Hkv heads, G = Hq / Hkv, D head_dim.

Two kinds of work per layer, after the step's K and V are written to their slots:

* sequences with one token (decode) attend together, in buckets of similar length: K and V are
  gathered into one padded batch, and the G query heads of a KV head stand where query positions
  would, so that K and V are not repeated;
* longer chunks (prefill) attend one sequence at a time, in blocks of queries, so that no temporary
  ever has the size (chunk length x context length).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from kvferry.cache.paged import PagedKV
from kvferry.engine.plan import Int64
from kvferry.engine.step_tensors import StepTensors, token_slots
from kvferry.models.decoder import Heads

QUERY_BLOCK = 128
MAX_BUCKET_TOKENS = 16384
"""Keys gathered at once at most, unless one sequence alone has more."""
MAX_BUCKET_PADDING = 0.75
"""The shortest sequence of a bucket has at least this share of the longest one's keys."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Decode rows that attend together."""

    tokens: torch.Tensor
    """[B] indexes into the step's tokens."""
    slots: torch.Tensor
    """[B * L]"""
    length: int
    mask: torch.Tensor | None
    """bool [B, 1, 1, L]; None when no row is padded."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """One sequence with more than one token."""

    start: int
    """Its tokens are start : end of the step's."""
    end: int
    context_len: int
    slots: torch.Tensor
    """[context_len + end - start]"""


class PagedAttention:
    """The decoder's ``attend`` callback for one step."""

    def __init__(self, kv: PagedKV, tensors: StepTensors) -> None:
        self._keys_values = kv.slots
        self._block_size = kv.block_size
        self._write_slots = tensors.slots
        query_lens = np.diff(tensors.query_starts)
        self._buckets = list(self._make_buckets(tensors, np.flatnonzero(query_lens == 1)))
        self._chunks = [
            self._make_chunk(tensors, int(seq)) for seq in np.flatnonzero(query_lens > 1)
        ]
        gathered = [bucket.slots for bucket in self._buckets]
        gathered += [chunk.slots for chunk in self._chunks if chunk.context_len]
        most = max(map(len, gathered), default=0)
        # Reused by all layers: fresh memory would cost a page fault per 4 KiB each time.
        self._scratch = kv.tensor.new_empty((2, most, kv.num_kv_heads, kv.head_dim))

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        """Write keys and values to their slots, then attend: [T, Hq, D]."""
        q, k = heads.rotated()
        k, v = self._write(layer, (k, heads.v))
        out = torch.empty_like(q)
        for bucket in self._buckets:
            self._attend_bucket(bucket, q, layer, out)
        for chunk in self._chunks:
            if chunk.context_len:
                keys, values = self._gather(layer, chunk.slots)
            else:
                keys, values = k[chunk.start : chunk.end], v[chunk.start : chunk.end]
            _attend_chunk(chunk, q, (keys.to(q.dtype), values.to(q.dtype)), out)
        return out

    def _make_buckets(self, tensors: StepTensors, seqs: NDArray[np.intp]) -> Iterator[_Bucket]:
        lengths = tensors.context_lens[seqs].astype(np.int64) + 1
        order = np.argsort(-lengths, kind="stable")
        seqs, lengths = seqs[order], lengths[order]
        for start, end in _bucket_bounds(lengths):
            part, part_lengths = seqs[start:end], lengths[start:end]
            longest = int(part_lengths[0])
            slots = token_slots(tensors.block_tables[part], part_lengths, self._block_size)
            mask = None
            if part_lengths[-1] < longest:
                inside = np.arange(longest) < part_lengths[:, None]
                mask = self._on_device(inside)[:, None, None, :]
            tokens = self._on_device(tensors.query_starts[part])
            yield _Bucket(tokens, self._on_device(slots).flatten(), longest, mask)

    def _make_chunk(self, tensors: StepTensors, seq: int) -> _Chunk:
        start, end = (int(i) for i in tensors.query_starts[seq : seq + 2])
        context_len = int(tensors.context_lens[seq])
        length = np.array([context_len + end - start], dtype=np.int64)
        slots = token_slots(tensors.block_tables[seq : seq + 1], length, self._block_size)[0]
        return _Chunk(start, end, context_len, self._on_device(slots))

    def _on_device(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._keys_values.device)

    def _write(
        self, layer: int, parts: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, Hkv, D] to their slots. Returns them as the cache holds them."""
        cache = self._keys_values[layer]
        k, v = (part.to(cache.dtype) for part in parts)
        cache[0].index_copy_(0, self._write_slots, k)
        cache[1].index_copy_(0, self._write_slots, v)
        return k, v

    def _gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(slots), Hkv, D], valid until the next call."""
        k, v = (
            torch.index_select(part, 0, slots, out=scratch[: len(slots)])
            for part, scratch in zip(self._keys_values[layer], self._scratch, strict=True)
        )
        return k, v

    def _attend_bucket(
        self,
        bucket: _Bucket,
        q: torch.Tensor,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        shape = (len(bucket.tokens), bucket.length)
        keys, values = (
            part.unflatten(0, shape).transpose(1, 2).to(q.dtype)
            for part in self._gather(layer, bucket.slots)
        )
        queries = q[bucket.tokens].unflatten(1, (keys.shape[1], -1))
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=bucket.mask)
        out[bucket.tokens] = attended.flatten(1, 2)


def _bucket_bounds(lengths: Int64) -> Iterator[tuple[int, int]]:
    """Ranges of falling ``lengths`` that share a bucket."""
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        most = start + max(1, MAX_BUCKET_TOKENS // longest)
        # The lengths fall, so that their negatives are sorted.
        alike = np.searchsorted(-lengths, -longest * MAX_BUCKET_PADDING, side="right")
        end = min(most, int(alike))
        yield start, end
        start = end


def _attend_chunk(
    chunk: _Chunk,
    q: torch.Tensor,
    keys_values: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Causal attention of one chunk's queries over its L keys and values [L, Hkv, D]."""
    # [1, heads, tokens, D], as the operation wants them.
    keys, values = (part.transpose(0, 1).unsqueeze(0) for part in keys_values)
    positions = torch.arange(keys.shape[2], device=q.device)
    for start in range(chunk.start, chunk.end, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, chunk.end)
        first, last = (chunk.context_len + i - chunk.start for i in (start, end))
        attended = scaled_dot_product_attention(
            q[start:end].transpose(0, 1).unsqueeze(0),
            keys[:, :, :last],
            values[:, :, :last],
            attn_mask=positions[:last] <= positions[first:last, None],
            enable_gqa=True,
        )
        out[start:end] = attended[0].transpose(0, 1)
