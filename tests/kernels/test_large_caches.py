"""A cache of 80 GB has more elements than 32 bits can number: blocks behind the 2^31st element hold
what the same blocks of a small cache hold, and are read and written alike.
"""

from __future__ import annotations

import pytest
import torch
from kernel_data import random_tensors
from sparse_memory import WRAP, sparse

from kvferry.kernels.flash_attention import wrapper as flash_attention
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_decoding import wrapper as flash_decoding
from kvferry.kernels.flash_decoding.configs import Config
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import KvLayer, quantised
from kvferry.kernels.kv_pack import wrapper as kv_pack
from kvferry.kernels.kv_pack.slab import KvSlots, Tokens, slab_shape
from kvferry.kernels.launch import chip_of
from kvferry.kernels.rope_kv_write import wrapper as rope_kv_write

torch.set_num_threads(1)

BLOCK_SIZE, DIM = 16, 64
CONTEXT = 3 * BLOCK_SIZE - 5
STEP = WRAP // 2 + 4096
"""Elements between blocks of a far layer: the last two of four lie behind the 2^31st."""
TABLES = torch.tensor([[3, 1, 2]], dtype=torch.int32)


def near_layer(dtype: torch.dtype) -> KvLayer:
    random = random_tensors(5)
    (k, k_scale), (v, v_scale) = (quantised(random(4, BLOCK_SIZE, 2, DIM), dtype) for _ in range(2))
    return KvLayer(k, v, k_scale, v_scale)


def with_far_elements(near: KvLayer) -> KvLayer:
    strides = (STEP, *near.k.stride()[1:])
    k, v = (sparse(*near.k.shape, dtype=near.k.dtype, strides=strides) for _ in range(2))
    k.copy_(near.k)
    v.copy_(near.v)
    return KvLayer(k, v, near.k_scale, near.v_scale)


def lens(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def decoded(kv: KvLayer, tables: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Attention of one token behind CONTEXT others."""
    splits = SplitPlan.for_bucket(1, 1, 4, kv, 64, chip_of(q.device), config=Config(tile=16))
    flash_decoding.plan_splits(lens(CONTEXT), lens(0, 1), splits)
    lengths = lens(CONTEXT), lens(0, 1)
    return flash_decoding.flash_decoding(q, kv, tables, *lengths, splits, scale=0.2)


def prefilled(kv: KvLayer, tables: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Attention of the last three tokens of CONTEXT."""
    lengths = [3], [CONTEXT - 3]
    plan = PrefillPlan.of(*lengths)
    return flash_attention.flash_attention(
        q, kv, tables, lens(0, 3), lens(CONTEXT - 3), plan, scale=0.2
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_decoding_reads_far_blocks(dtype: torch.dtype) -> None:
    near = near_layer(dtype)
    q = random_tensors(1)(1, 4, DIM, dtype=torch.float16)
    expected = decoded(near, TABLES, q)
    assert torch.equal(decoded(with_far_elements(near), TABLES, q), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_prefill_reads_far_blocks(dtype: torch.dtype) -> None:
    near = near_layer(dtype)
    q = random_tensors(1)(3, 4, DIM, dtype=torch.float16)
    expected = prefilled(near, TABLES, q)
    assert torch.equal(prefilled(with_far_elements(near), TABLES, q), expected)


def test_attention_reads_far_scales() -> None:
    near = near_layer(torch.int8)
    num_blocks = WRAP // (BLOCK_SIZE * 2) + 4
    assert near.k_scale is not None
    assert near.v_scale is not None
    scales = [sparse(num_blocks, BLOCK_SIZE, 2, dtype=torch.float32) for _ in range(2)]
    for far, scale in zip(scales, (near.k_scale, near.v_scale), strict=True):
        far[-4:] = scale
    # All blocks have the elements of one, so that few elements have many scales.
    k, v = (x[:1].expand(num_blocks, -1, -1, -1) for x in (near.k, near.v))
    far_layer = KvLayer(k, v, *scales)
    near_alike = KvLayer(k[:4], v[:4], near.k_scale, near.v_scale)
    q = random_tensors(1)(3, 4, DIM, dtype=torch.float16)
    tables = TABLES + num_blocks - 4
    assert torch.equal(decoded(far_layer, tables, q[:1]), decoded(near_alike, TABLES, q[:1]))
    assert torch.equal(prefilled(far_layer, tables, q), prefilled(near_alike, TABLES, q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_far_slots_are_written(dtype: torch.dtype) -> None:
    random = random_tensors(2)
    q, k, v = random(4, 4, DIM), random(4, 2, DIM), random(4, 2, DIM)
    angles = random(4, DIM // 2)
    slots = torch.tensor([2, 17, 40, 63])
    near = near_layer(dtype)
    far = with_far_elements(near)
    for kv in (near, far):
        rope_kv_write.rope_kv_write(q, k, v, angles, angles, slots, kv)
    assert torch.equal(far.k, near.k)
    assert torch.equal(far.v, near.v)


def test_far_slots_move() -> None:
    near = KvSlots(random_tensors(3)(1, 2, 4 * BLOCK_SIZE, 1, DIM))
    num_blocks = WRAP // (BLOCK_SIZE * DIM) + 4
    far = KvSlots(sparse(1, 2, num_blocks * BLOCK_SIZE, 1, DIM, dtype=torch.float32))
    last = far.elements[:, :, -4 * BLOCK_SIZE :]
    last.copy_(near.elements)
    whole = (0, 1), (0, 1)
    for wire in (torch.float32, torch.float16):
        slabs = []
        for kv, shift in ((near, 0), (far, num_blocks - 4)):
            blocks = Tokens(
                blocks=torch.tensor([3, 0]) + shift, begin=3, end=21, block_size=BLOCK_SIZE
            )
            target = Tokens(
                blocks=torch.tensor([1, 2]) + shift, begin=3, end=21, block_size=BLOCK_SIZE
            )
            shape = slab_shape(kv, blocks, *whole, wire)
            slabs.append(torch.empty(shape.nbytes, dtype=torch.uint8))
            kv_pack.gather(kv, blocks, *whole, wire, slabs[-1])
            kv_pack.scatter(kv, target, *whole, wire, slabs[-1])
        assert torch.equal(*slabs)
        assert torch.equal(last, near.elements)


def test_far_blocks_are_copied() -> None:
    near = KvSlots(random_tensors(3)(1, 2, 4 * BLOCK_SIZE, 1, DIM))
    num_blocks = WRAP // (BLOCK_SIZE * DIM) + 4
    far = KvSlots(sparse(1, 2, num_blocks * BLOCK_SIZE, 1, DIM, dtype=torch.float32))
    last = far.elements[:, :, -4 * BLOCK_SIZE :]
    last.copy_(near.elements)
    for kv, shift in ((near, 0), (far, num_blocks - 4)):
        sources, targets = torch.tensor([3]) + shift, torch.tensor([1]) + shift
        kv_pack.copy_blocks(kv, BLOCK_SIZE, sources, targets)
    assert torch.equal(last, near.elements)
