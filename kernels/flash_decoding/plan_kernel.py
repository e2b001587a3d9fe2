"""The split plan of a step, computed on the device from its lengths.

Shapes: S sequences, P programs; see ``splits`` for what the plan is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.flash_decoding.splits import ITEM_FIELDS

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)


@triton.jit
def plan_splits_kernel(
    p_context_lens,
    p_query_starts,
    p_items,
    p_program_items,
    p_seq_items,
    window,
    num_seqs,
    num_programs,
    WINDOW: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The items of one sequence, or the first item of one program. Grid (S + 1 + P + 1,).

    The tiles of sequence s are at [begin, begin + tiles) on the line, and it is cut where a
    coordinate of the tile is a multiple of ``unit``: balanced, its place on the line and the tiles
    per program; batch-invariant, its place in the sequence and SPLIT_TILES.
    """
    i_program = tl.program_id(0)
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_seqs
    b_context = tl.load(p_context_lens + o_s, mask=m_s, other=0)
    b_queries = tl.load(p_query_starts + o_s + 1, mask=m_s, other=0)
    b_queries -= tl.load(p_query_starts + o_s, mask=m_s, other=0)
    b_first = tl.zeros([BLOCK_S], tl.int32)
    if WINDOW:
        b_first = tl.maximum(b_context - window + 1, 0) // TILE
    b_tiles = (b_context + b_queries + TILE - 1) // TILE - b_first
    b_tiles = tl.where(b_queries > 0, b_tiles, 0)
    b_begin = tl.cumsum(b_tiles, 0) - b_tiles
    per_program = tl.maximum((tl.sum(b_tiles, 0) + num_programs - 1) // num_programs, 1)
    if SPLIT_TILES > 0:
        unit = SPLIT_TILES
        b_coordinate = b_first
    else:
        unit = per_program
        b_coordinate = b_begin
    b_items = (b_coordinate + b_tiles - 1) // unit - b_coordinate // unit + 1
    b_items = tl.where(b_tiles > 0, b_items, 0)

    if i_program > num_seqs:
        # Items that begin before this program's place on the line.
        i_p = i_program - num_seqs - 1
        b_before = tl.minimum(i_p * per_program - b_begin, b_tiles)
        b_count = (b_coordinate + b_before - 1) // unit - b_coordinate // unit + 1
        b_count = tl.where(b_before > 0, b_count, 0)
        tl.store(p_program_items + i_p, tl.sum(b_count, 0))
        return
    i_item = tl.sum(tl.where(o_s < i_program, b_items, 0), 0)
    tl.store(p_seq_items + i_program, i_item)
    m_mine = o_s == i_program
    first = tl.sum(tl.where(m_mine, b_first, 0), 0)
    tiles = tl.sum(tl.where(m_mine, b_tiles, 0), 0)
    coordinate = tl.sum(tl.where(m_mine, b_coordinate, 0), 0)
    num_items = tl.sum(tl.where(m_mine, b_items, 0), 0)
    for i_group in range(0, num_items, BLOCK_C):
        o_c = i_group + tl.arange(0, BLOCK_C)
        m_c = o_c < num_items
        b_cut = (coordinate // unit + o_c) * unit - coordinate
        b_start = tl.maximum(b_cut, 0)
        b_end = tl.minimum(b_cut + unit, tiles)
        p_item = p_items + (i_item + o_c) * _ITEM_FIELDS
        tl.store(p_item, i_program + tl.zeros([BLOCK_C], tl.int32), mask=m_c)
        tl.store(p_item + 1, first + b_start, mask=m_c)
        tl.store(p_item + 2, b_end - b_start, mask=m_c)
