"""Copy-on-write of whole blocks, and swaps to and from host memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import random_tensors

from kvferry.kernels.kv_layer import FLOAT_TYPES, QUANTISED_TYPES, quantised
from kvferry.kernels.kv_pack import reference, wrapper
from kvferry.kernels.kv_pack.slab import KvSlots, swap_nbytes

torch.set_num_threads(1)

TYPES = FLOAT_TYPES + QUANTISED_TYPES


def random_cache(seed: int, dtype: torch.dtype, *shape: int) -> KvSlots:
    elements, scales = quantised(random_tensors(seed)(*shape), dtype)
    return KvSlots(elements.contiguous(), scales)


def copied(kv: KvSlots) -> KvSlots:
    return KvSlots(kv.elements.clone(), None if kv.scales is None else kv.scales.clone())


def tensors(kv: KvSlots) -> list[torch.Tensor]:
    """Elements as bytes, and scales: what must stay equal bit for bit."""
    return [kv.elements.view(torch.uint8), *([] if kv.scales is None else [kv.scales])]


def equal(a: KvSlots, b: KvSlots) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(TYPES),
    block_size=st.sampled_from([1, 8, 48]),
    num_blocks=st.integers(2, 7),
    # 3 x 48 x 80 floats are more than one program copies.
    heads=st.sampled_from([(1, 4), (3, 80)]),
    data=st.data(),
)
def test_copies_whole_blocks_and_no_others(
    seed: int,
    dtype: torch.dtype,
    block_size: int,
    num_blocks: int,
    heads: tuple[int, int],
    data: st.DataObject,
) -> None:
    kv = random_cache(seed, dtype, 2, 2, num_blocks * block_size, *heads)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    n = data.draw(st.integers(0, num_blocks - 1))
    targets, rest = order[:n].clone(), order[n:]
    # One source may have several targets.
    sources = rest[torch.randint(len(rest), (n,), generator=torch.Generator().manual_seed(seed))]
    expected, plain = copied(kv), copied(kv)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for tensor in tensors(expected):
            blocks = tensor.unflatten(2, (-1, block_size))
            blocks[:, :, target] = blocks[:, :, source]
    wrapper.copy_blocks(kv, block_size, sources, targets)
    reference.copy_blocks(plain, block_size, sources, targets)
    assert equal(kv, expected)
    assert equal(plain, expected)


@pytest.mark.parametrize("module", [reference, wrapper])
@pytest.mark.parametrize(
    ("sources", "targets", "named"),
    [
        ([0, 1], [2, 2], "distinct"),
        ([0, 2], [2, 3], "none a source"),
        ([0], [4], "outside"),
        ([-1], [1], "outside"),
        ([0, 1], [2], "targets"),
    ],
)
def test_chains_are_refused(module, sources: list[int], targets: list[int], named: str) -> None:
    kv = random_cache(1, torch.float32, 1, 2, 32, 1, 4)
    before = copied(kv)
    with pytest.raises(ValueError, match=named):
        module.copy_blocks(kv, 8, torch.tensor(sources), torch.tensor(targets))
    assert equal(kv, before)


@pytest.mark.parametrize("module", [reference, wrapper])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_swapped_out_comes_back_bit_for_bit(module, dtype: torch.dtype) -> None:
    kv = random_cache(2, dtype, 2, 2, 48, 2, 20)
    kv.elements.view(torch.uint8)[0, 0, 9] = 0xFF
    nbytes = swap_nbytes(kv, 8, 3)
    staging, host = (torch.empty(nbytes, dtype=torch.uint8) for _ in range(2))
    blocks, others = torch.tensor([1, 5, 0]), torch.tensor([4, 2, 3])
    before = copied(kv)
    totals = module.swap_out(kv, 8, blocks, staging, host)
    assert equal(kv, before)
    staging.fill_(0xAA)
    assert torch.equal(module.swap_in(kv, 8, others, staging, host), totals)
    for tensor, old in zip(tensors(kv), tensors(before), strict=True):
        now, then = (x.unflatten(2, (-1, 8)) for x in (tensor, old))
        assert torch.equal(now[:, :, others], then[:, :, blocks])
        assert torch.equal(now[:, :, blocks], then[:, :, blocks])
    host[7] ^= 1
    assert not torch.equal(module.swap_in(kv, 8, others, staging, host), totals)


def test_swaps_refuse_a_host_buffer_of_another_size() -> None:
    kv = random_cache(3, torch.bfloat16, 1, 2, 16, 1, 4)
    staging = torch.empty(swap_nbytes(kv, 8, 1), dtype=torch.uint8)
    for module in (reference, wrapper):
        for swap in (module.swap_out, module.swap_in):
            with pytest.raises(ValueError, match="host"):
                swap(kv, 8, torch.tensor([0]), staging, staging[1:].clone())
