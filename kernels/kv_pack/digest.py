"""The digest of slabs on a GPU: per tile, a multiply-sum over 32-bit words with keys by position.

With w[t, c] word c of token t (tokens are numbered row by row; the scales of a token follow its
elements), the sum of a tile is, in 64-bit integers,

    sum over its t of  key(t) * (1 + sum over c of w[t, c] * key(c | COLUMNS))   mod 2^64

and its digest is that sum mixed with the numbers of slab and tile. Sums commute, so the result is
the same however programs share the work, and gather, scatter and this reference agree. The two
levels cost one wide multiply-add per word: keys are made once per token and once per column.
(Multiply-sum hashing by positional keys: Carter and Wegman, "Universal classes of hash functions",
1979; here the keys are fixed, since accidents do not choose their place.)

What it finds. A key is odd, and the low 32 bits of any two keys differ. Always found: a change
within one word (an odd multiple of a number below 2^32 is not 0 mod 2^64); two words of one token
exchanged, or two words of one column (the difference of two words has at most 31 factors of 2, the
difference of two keys too, and 31 + 31 < 64). Anything else escapes with a chance near 2^-32 at
worst, when only top bits of words differ, and near 2^-64 otherwise. It is no defence against an
attacker, who can solve for a collision.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.slab import SlabShape

COLUMNS = 1 << 30
"""Columns are numbered from here, tokens from 0: no token has the key of a column."""

MASK_31 = (1 << 31) - 1
MASK_32 = (1 << 32) - 1
# Odd, else arbitrary: digits of the fractional parts of the square roots of 2, 3 and 5.
MIX_1 = 0x6A09E667
MIX_2 = 0xBB67AE85
MIX_3 = 0x3C6EF373
# The increment and the two multipliers of SplitMix64 (Steele, Lea, Flood, 2014).
GOLDEN = 0x9E3779B97F4A7C15
SPLIT_1 = 0xBF58476D1CE4E5B9
SPLIT_2 = 0x94D049BB133111EB


def keys(positions: torch.Tensor) -> torch.Tensor:
    """int64 positions in [0, 2^31) -> odd 64-bit keys, as int64.

    Every step on 31 bits is invertible, so that no two positions share the low half of their key.
    """
    x = positions ^ (positions >> 16)
    x = (x * MIX_1) & MASK_31
    x = x ^ (x >> 15)
    x = (x * MIX_2) & MASK_31
    x = x ^ (x >> 16)
    high = ((x ^ (x >> 11)) * MIX_3) & MASK_32
    return (high << 32) | (2 * x + 1)


def tile_sums(slab: torch.Tensor, shape: SlabShape) -> torch.Tensor:
    """int64 [num_tiles]: the sum of every tile of a slab."""
    device = slab.device
    words = shape.elements(slab).view(torch.int32).flatten(2)
    scales = shape.scales(slab)
    if scales is not None:
        words = torch.cat([words, scales.view(torch.int32)], dim=2)
    unsigned = words.to(torch.int64) & MASK_32
    column_keys = keys(torch.arange(unsigned.shape[2], device=device) | COLUMNS)
    token_keys = keys(torch.arange(shape.rows * shape.tokens, device=device))
    token_sums = ((unsigned * column_keys).sum(-1) + 1) * token_keys.view(shape.rows, shape.tokens)
    return _by_tile(token_sums, shape)


def _by_tile(values: torch.Tensor, shape: SlabShape) -> torch.Tensor:
    """Sums of values [R, T] over the tokens of each tile."""
    cut = shape.cut
    row = torch.arange(shape.rows, device=values.device)[:, None] // cut.rows_per_tile
    part = torch.arange(shape.tokens, device=values.device)[None, :] // cut.tokens_per_tile
    tile = (row * cut.tiles_per_row + part).flatten()
    return values.new_zeros(cut.num_tiles).index_add_(0, tile, values.flatten())


def digests(sums: NDArray[np.int64], slab_index: int) -> list[int]:
    """The digests of a slab's tiles: 64-bit, and other ones in another place.

    ``sums`` [num_tiles] on the host; ``slab_index`` is the number of the slab in its transfer.
    """
    number = np.arange(len(sums), dtype=np.uint64) | np.uint64(slab_index << 32)
    x = sums.view(np.uint64) + (number + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(SPLIT_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SPLIT_2)
    mixed: list[int] = (x ^ (x >> np.uint64(31))).tolist()
    return mixed
