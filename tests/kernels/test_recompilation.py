"""Nothing is compiled while a worker serves: what changes from step to step is no part of the code.

Triton's launcher compiles anew when an integer becomes 1, or a multiple of 16, or stops being one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from meta_tensors import empty, int32, int64

from kvferry.kernels.aot import identity
from kvferry.kernels.chips import CHIPS
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.flash_decoding.wrapper import flash_decoding_launches
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.kv_pack.launches import copy_launch, move_launch
from kvferry.kernels.kv_pack.slab import KvSlots, Tokens, slab_shape
from kvferry.kernels.launch import Launch
from kvferry.kernels.rope_kv_write.wrapper import rope_kv_write_launch

H100 = CHIPS["H100"]
SIZES = (1, 2, 16, 17, 48, 1000)


LAYER = KvLayer(empty(1000, 16, 8, 128), empty(1000, 16, 8, 128))


def ropes() -> Iterator[Launch]:
    """Of any number of tokens."""
    for tokens in SIZES:
        q, k, angles = empty(tokens, 32, 128), empty(tokens, 8, 128), empty(tokens, 64)
        yield rope_kv_write_launch(
            q, k, k, angles, angles, int64(tokens), LAYER, None, None, 0.0, q, H100
        )


def decodings(index: int, num_seqs: tuple[int, ...]) -> Iterator[Launch]:
    """Split or merge, over any buckets of sequences, numbers of tokens and widths of tables."""
    for seqs in num_seqs:
        splits = SplitPlan.for_bucket(seqs, 1, 32, LAYER, 4096, H100)
        for tokens in (size for size in SIZES if size <= seqs):
            for width in SIZES:
                q = empty(tokens, 32, 128)
                yield flash_decoding_launches(
                    q,
                    LAYER,
                    int32(seqs, width),
                    int32(seqs),
                    int32(seqs + 1),
                    splits,
                    H100,
                    q,
                    scale=0.1,
                )[index]


def moves(wire: torch.dtype, dtype: torch.dtype = torch.bfloat16) -> Iterator[Launch]:
    """Of any token range; tiles that have parts of a row, and such that have many rows."""
    kv = KvSlots(empty(4, 2, 16000, 8, 128, dtype=dtype))
    for begin in (0, 1, 3, 32):
        for count in SIZES:
            for layers in ((0, 1), (0, 4)):
                tokens = Tokens(blocks=int32(1000), begin=begin, end=begin + count, block_size=16)
                shape = slab_shape(kv, tokens, layers, (0, 8), wire)
                slab, totals = (
                    empty(shape.nbytes, dtype=torch.uint8),
                    int64(1 + shape.cut.num_tiles),
                )
                yield move_launch(kv, tokens, layers, (0, 8), shape, slab, totals, True, H100)


def copies() -> Iterator[Launch]:
    """Of any number of blocks."""
    kv = KvSlots(empty(4, 2, 16000, 8, 128))
    for size in SIZES:
        yield copy_launch(kv, 16, int64(size), int64(size), H100)


@pytest.mark.parametrize(
    "launches",
    [
        pytest.param(ropes, id="rope_kv_write"),
        pytest.param(lambda: decodings(0, (1, 4, 64)), id="flash_decoding"),
        pytest.param(lambda: decodings(1, (1, 4, 64)), id="merge"),
        pytest.param(lambda: moves(torch.bfloat16), id="move"),
        pytest.param(lambda: moves(torch.float8_e4m3fn), id="convert"),
        pytest.param(copies, id="copy"),
    ],
)
def test_one_binary_serves_every_size(launches: Callable[[], Iterator[Launch]]) -> None:
    assert len({identity(launch) for launch in launches()}) == 1
