"""The launch that brings the keys and values of a prefill step into a workspace."""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention.unpack_kernel import unpack_kernel
from kvferry.kernels.flash_attention.workspace import BLOCK_TOKENS, StepWorkspace
from kvferry.kernels.kv_layer import FLOAT_TYPES, KvLayer, kind_of
from kvferry.kernels.launch import Launch, next_power_of_2, require

TOKENS = 32
"""Of one KV head, per program: 8 KiB of keys and values in flight at a head dimension of 128, and
enough programs for every multiprocessor from 1k tokens on."""


def unpack_launch(
    kv: KvLayer, block_tables: torch.Tensor, workspace: StepWorkspace, chip: Chip
) -> Launch:
    """Fills the blocks of ``workspace``. Raises ValueError naming what does not fit."""
    kv.check()
    shape = (2, workspace.elements.shape[1], BLOCK_TOKENS, kv.num_kv_heads, kv.head_dim)
    require(workspace.elements.shape == shape, "workspace", f"must hold {shape}")
    require(workspace.elements.is_contiguous(), "workspace", "must be contiguous")
    require(workspace.elements.dtype in FLOAT_TYPES, "workspace", "must be of a float type")
    same = workspace.tables.shape[0] == block_tables.shape[0]
    require(same, "workspace", f"is of {workspace.tables.shape[0]} sequences")
    require(block_tables.dim() == 2, "block_tables", "must be [S, blocks]")
    require(block_tables.stride(1) == 1, "block_tables", "rows must be contiguous")
    require(block_tables.dtype is torch.int32, "block_tables", "must be int32")
    k, v = kv.storage()
    k_out, v_out = workspace.elements.unbind()
    num_blocks = workspace.blocks.shape[0]
    return Launch(
        kernel=unpack_kernel,
        grid=(num_blocks * (BLOCK_TOKENS // TOKENS) * kv.num_kv_heads,),
        args={
            "p_k": k,
            "p_v": v,
            "p_k_scale": kv.k_scale,
            "p_v_scale": kv.v_scale,
            "p_k_out": k_out,
            "p_v_out": v_out,
            "p_blocks": workspace.blocks,
            "p_tables": block_tables,
            "block_stride": k.stride(0),
            "token_stride": k.stride(1),
            "head_stride": k.stride(2),
            "table_stride": block_tables.stride(0),
        },
        constants={
            "NUM_HEADS": kv.num_kv_heads,
            "HEAD_DIM": kv.head_dim,
            "WIDTH": next_power_of_2(kv.head_dim),
            "BLOCK_SIZE": kv.block_size,
            "BLOCK_TOKENS": BLOCK_TOKENS,
            "TOKENS": TOKENS,
            "KIND": kind_of(kv.k.dtype, chip),
        },
        num_warps=4,
    )
