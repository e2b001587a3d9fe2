"""Nothing is compiled while a worker serves: prefill has one binary for every step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvferry.kernels.aot import identity
from kvferry.kernels.chips import CHIPS
from kvferry.kernels.flash_attention.unpack import unpack_launch
from kvferry.kernels.flash_attention.workspace import BLOCK_TOKENS, StepWorkspace
from kvferry.kernels.flash_attention.wrapper import flash_attention_launch
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.launch import Launch

H100 = CHIPS["H100"]
SIZES = (1, 2, 16, 17, 48)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def elements(*shape: int) -> torch.Tensor:
    return empty(*shape, 16, 8, 128, dtype=torch.bfloat16)


def prefills() -> Iterator[Launch]:
    """Of any numbers of tokens, sequences and blocks."""
    kv = KvLayer(elements(1000), elements(1000))
    for size in SIZES:
        for width in SIZES:
            q = empty(16 * size, 32, 128, dtype=torch.bfloat16)
            lengths = empty(size, width), empty(size + 1), empty(size), empty(size, 2)
            yield flash_attention_launch(q, kv, *lengths, q, H100, scale=0.1)


def unpackings() -> Iterator[Launch]:
    codes, scale = (
        empty(1000, 16, 8, 128, dtype=torch.int8),
        empty(1000, 16, 8, dtype=torch.float32),
    )
    kv = KvLayer(codes, codes, scale, scale)
    room = empty(2, 64, BLOCK_TOKENS, 8, 128, dtype=torch.bfloat16)
    for size in SIZES:
        for width in SIZES:
            workspace = StepWorkspace(
                elements=room, blocks=empty(size, 3), tables=empty(size, width)
            )
            yield unpack_launch(kv, empty(size, width), workspace, H100)


def test_one_binary_attends() -> None:
    assert len({identity(launch) for launch in prefills()}) == 1


def test_one_binary_unpacks() -> None:
    assert len({identity(launch) for launch in unpackings()}) == 1
