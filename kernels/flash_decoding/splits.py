"""The split plan: which program reads which tiles of which sequence, as tensors on the device.

A tile is ``config.tile`` tokens from a multiple of it. The tiles that a step reads, sequence after
sequence, form one line. The line is cut

* where a sequence ends, and
* balanced: at every multiple of L = ceil(tiles / programs), so that each program has L tiles
  whatever the mixture of lengths ("Stream-K", Osama and others, 2023, for attention);
* batch-invariant: at fixed positions of each sequence, whoever else is in the batch.

Each piece is an *item*: one program reads it and writes one partial result. Items are numbered
along the line, so a program's items and a sequence's items are both ranges. How many programs,
items and sequences there can be follows from the bucket alone; what they are is computed on the
device in each step, so that a captured graph replays with new lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_decoding.configs import Config, config_for, max_rows
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.launch import next_power_of_2, require

MAX_QUERY_LEN = 16
INVARIANT_SPLIT = 1024
"""A good number of tokens per item of a batch-invariant plan: 32 programs share 32k tokens of each
KV head, and partial results are 1/256 of what was read (4 query heads per KV head, bf16)."""
ITEM_FIELDS = 4
"""Sequence, first tile, number of tiles, and one that makes an item 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """Shapes: S sequences, P programs per KV head, C items at most, H KV heads, R = query heads per
    KV head x queries, D head dimension.
    """

    config: Config
    max_query_len: int
    """Queries per sequence that the launch has room for, 1 to MAX_QUERY_LEN."""
    rows_per_tile: int
    """Rows of R that are multiplied at a time."""
    max_len: int
    """Tokens of a sequence, its queries included, that there is room for."""
    window: int | None
    """Keys that a query sees, itself included; None: all."""
    split_tiles: int
    """Tiles per item of a batch-invariant plan; 0: balanced."""
    items: torch.Tensor
    """int32 [C, ITEM_FIELDS], along the line."""
    program_items: torch.Tensor
    """int32 [P + 1]: program p has items program_items[p] to program_items[p + 1]."""
    seq_items: torch.Tensor
    """int32 [S + 1]: sequence s has items seq_items[s] to seq_items[s + 1]."""
    partial_out: torch.Tensor
    """float32 [C, H, R, D]: attention over the keys of one item."""
    partial_lse: torch.Tensor
    """float32 [C, H, R]: base-2 logarithm of the sum of the exponentials there."""

    @classmethod
    def for_bucket(
        cls,
        num_seqs: int,
        max_query_len: int,
        num_heads: int,
        kv: KvLayer,
        max_len: int,
        chip: Chip,
        *,
        window: int | None = None,
        invariant_split: int | None = None,
        config: Config | None = None,
    ) -> SplitPlan:
        """A plan for up to ``num_seqs`` sequences of up to ``max_len`` tokens, on ``kv``'s device.

        ``plan_splits`` sets its contents in each step. With ``invariant_split``, items end at
        multiples of so many tokens of a sequence, else where it suits the whole batch. Raises
        ValueError naming what does not fit.
        """
        require(1 <= max_query_len <= MAX_QUERY_LEN, "max_query_len", f"1 to {MAX_QUERY_LEN}")
        require(num_heads % kv.num_kv_heads == 0, "num_heads", "no multiple of the KV heads")
        require(window is None or window > 0, "window", "must be positive")
        rows = num_heads // kv.num_kv_heads * max_query_len
        # Fixed in a batch-invariant plan: another number of rows adds up in another order.
        rows_per_tile = min(max(16, next_power_of_2(rows)), max_rows(kv.k.itemsize))
        rows_per_tile = rows_per_tile if invariant_split is None else 16
        config = config or config_for(chip, kv.k.itemsize, kv.head_dim, rows_per_tile)
        row_tiles = -(-rows // rows_per_tile)
        num_programs = max(
            1, chip.num_sms * config.programs_per_sm // (kv.num_kv_heads * row_tiles)
        )
        split_tiles, capacity = 0, num_seqs + num_programs
        if invariant_split is not None:
            fits = invariant_split > 0 and invariant_split % config.tile == 0
            require(fits, "invariant_split", f"must be a multiple of the tile's {config.tile}")
            split_tiles = invariant_split // config.tile
            # A window may begin inside a split, and then reaches into one more.
            longest = max_len if window is None else min(max_len, window + max_query_len - 1)
            capacity = num_seqs * (-(-longest // invariant_split) + (window is not None))
        device = kv.k.device
        int32 = {"dtype": torch.int32, "device": device}
        float32 = {"dtype": torch.float32, "device": device}
        shape = (capacity, kv.num_kv_heads, rows)
        return cls(
            config=config,
            max_query_len=max_query_len,
            max_len=max_len,
            rows_per_tile=rows_per_tile,
            window=window,
            split_tiles=split_tiles,
            items=torch.zeros(capacity, ITEM_FIELDS, **int32),
            program_items=torch.zeros(num_programs + 1, **int32),
            seq_items=torch.zeros(num_seqs + 1, **int32),
            partial_out=torch.empty(*shape, kv.head_dim, **float32),
            partial_lse=torch.empty(shape, **float32),
        )

    @property
    def num_seqs(self) -> int:
        return self.seq_items.shape[0] - 1

    @property
    def num_programs(self) -> int:
        """Per KV head and tile of rows."""
        return self.program_items.shape[0] - 1
