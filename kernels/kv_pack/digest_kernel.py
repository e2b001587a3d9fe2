"""Device code that both kernels of gather and scatter share: places, keys and totals."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.kv_pack import digest

_COLUMNS = tl.constexpr(digest.COLUMNS)
_MIX_1 = tl.constexpr(digest.MIX_1)
_MIX_2 = tl.constexpr(digest.MIX_2)
_MIX_3 = tl.constexpr(digest.MIX_3)


@triton.jit
def keys(o_position):
    """``digest.keys`` of positions in [0, 2^31), as uint64."""
    b_x = o_position.to(tl.uint32)
    b_x = b_x ^ (b_x >> 16)
    b_x = (b_x * _MIX_1) & 0x7FFFFFFF
    b_x = b_x ^ (b_x >> 15)
    b_x = (b_x * _MIX_2) & 0x7FFFFFFF
    b_x = b_x ^ (b_x >> 16)
    b_high = (b_x ^ (b_x >> 11)) * _MIX_3
    return (b_high.to(tl.uint64) << 32) | (2 * b_x + 1).to(tl.uint64)


@triton.jit
def column_keys(o_column):
    """Keys of the words of a token, as uint64."""
    return keys(o_column | _COLUMNS)


@triton.jit
def tokens_of_program(num_tokens, tokens_per_tile, runs_per_tile, BLOCK_T: tl.constexpr):
    """Row, tile within the row, tokens of the range, and which of these exist."""
    i_row = tl.program_id(1).to(tl.int64)
    i_part, i_run = tl.program_id(0) // runs_per_tile, tl.program_id(0) % runs_per_tile
    o_t = i_part * tokens_per_tile + i_run * BLOCK_T + tl.arange(0, BLOCK_T)
    return i_row, i_part, o_t, o_t < tl.minimum((i_part + 1) * tokens_per_tile, num_tokens)


@triton.jit
def find_slots(
    p_blocks,
    p_live,
    p_leased,
    o_position,
    m_t,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    CHECK: tl.constexpr,
):
    """int64 slots of token positions, and which of them may be touched."""
    o_entry = o_position // BLOCK_SIZE
    b_block = tl.load(p_blocks + o_entry, mask=m_t, other=-1).to(tl.int64)
    m_fresh = (b_block >= 0) & (b_block < num_slots // BLOCK_SIZE)
    if CHECK:
        b_live = tl.load(p_live + b_block, mask=m_fresh, other=0)
        b_leased = tl.load(p_leased + o_entry, mask=m_t, other=0)
        m_fresh = m_fresh & (b_live == b_leased)
    return b_block * BLOCK_SIZE + o_position % BLOCK_SIZE, m_fresh


@triton.jit
def add_totals(p_totals, b_sum, m_t, m_fresh, i_row, i_part, rows_per_tile, tiles_per_row):
    """Add a program's uint64 sum to its tile's, and the tokens it left out to their count."""
    i_tile = (i_row // rows_per_tile) * tiles_per_row + i_part
    tl.atomic_add(p_totals + 1 + i_tile, b_sum.to(tl.int64, bitcast=True), sem="relaxed")
    b_stale = tl.sum((m_t & (m_fresh == 0)).to(tl.int64), axis=0)
    if b_stale > 0:
        tl.atomic_add(p_totals, b_stale, sem="relaxed")
