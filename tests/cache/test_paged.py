"""The paged tensors and the arithmetic of their size."""

from __future__ import annotations

import pytest
import torch

from kvferry.cache.paged import PagedKV, block_nbytes, num_blocks_for
from kvferry.core.errors import ConfigError


def test_slots_share_the_tensors_memory() -> None:
    kv = PagedKV.allocate(
        num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, num_blocks=5, dtype=torch.float64
    )
    assert kv.tensor.shape == (3, 2, 5, 8, 2, 4)
    assert (kv.num_layers, kv.num_blocks, kv.block_size) == (3, 5, 8)
    assert (kv.num_kv_heads, kv.head_dim, kv.dtype) == (2, 4, torch.float64)
    assert kv.slots.shape == (3, 2, 40, 2, 4)
    assert not kv.tensor.any()
    kv.slots[1, 0, 3 * 8 + 5] = 7.0
    assert (kv.tensor[1, 0, 3, 5] == 7.0).all()
    assert kv.tensor.sum() == 7.0 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
def test_a_layer_shares_the_memory(dtype: torch.dtype) -> None:
    kv = PagedKV.allocate(
        num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, num_blocks=5, dtype=dtype
    )
    layer = kv.layer(1)
    layer.check()
    assert layer.is_quantised == (kv.scales is not None) == (dtype is not torch.float16)
    layer.v[2, 3, 1] = 1.0
    assert kv.tensor[1, 1, 2, 3, 1].float().tolist() == [1.0] * 4
    total = kv.tensor.nbytes
    if kv.scales is not None and layer.k_scale is not None:
        layer.k_scale[4, 7, 1] = 2.5
        assert kv.scales[1, 0, 4, 7, 1] == 2.5
        total += kv.scales.nbytes
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "block_size": 8}
    assert 5 * block_nbytes(**sizes, dtype=dtype) == total


def test_blocks_fill_the_budget() -> None:
    nbytes = block_nbytes(
        num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32
    )
    assert nbytes == 30 * 2 * 16 * 3 * 64 * 4
    kv = PagedKV.allocate(
        num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, num_blocks=1, dtype=torch.float32
    )
    assert kv.tensor.nbytes == nbytes
    assert num_blocks_for(10 * nbytes, nbytes) == 10
    assert num_blocks_for(10 * nbytes - 1, nbytes) == 9


def test_too_small_a_budget_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"decode\.kv_memory.*room for 3 KV blocks.*4000") as info:
        num_blocks_for(3999, 1000, key="decode.kv_memory")
    assert info.value.key == "decode.kv_memory"
