"""Copies of whole blocks within the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_part(
    p_words, b_source, b_target, i_row, i_part, num_blocks, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Part ``i_part`` of a block's words in one row."""
    o_w = i_part * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < WORDS
    b_word = tl.load(p_words + (i_row * num_blocks + b_source) * WORDS + o_w, mask=m_w, other=0)
    tl.store(p_words + (i_row * num_blocks + b_target) * WORDS + o_w, b_word, mask=m_w)


@triton.jit
def copy_blocks_kernel(
    p_elements,
    p_scales,
    p_sources,
    p_targets,
    num_blocks,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALE_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Block targets[i] = block sources[i] in every row (K or V of a layer), scales as well.

    Programs: (part of a block, row, pair of blocks). Parts beyond PARTS are the scales'. A pair
    with a block outside the cache is left out.
    """
    i_part = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    i_pair = tl.program_id(0) // (PARTS + SCALE_PARTS)
    i_part = tl.program_id(0) % (PARTS + SCALE_PARTS)
    b_source, b_target = tl.load(p_sources + i_pair), tl.load(p_targets + i_pair)
    is_inside = (tl.minimum(b_source, b_target) >= 0) & (
        tl.maximum(b_source, b_target) < num_blocks
    )
    if is_inside:
        if i_part < PARTS:
            copy_part(p_elements, b_source, b_target, i_row, i_part, num_blocks, WORDS, BLOCK)
        elif SCALE_PARTS > 0:
            copy_part(
                p_scales, b_source, b_target, i_row, i_part - PARTS, num_blocks, SCALE_WORDS, BLOCK
            )
