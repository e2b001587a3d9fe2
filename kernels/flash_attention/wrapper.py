"""Attention of a ragged batch on the GPU: same function and meaning as ``reference``."""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention.configs import Config, config_for
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_attention.kernel import flash_attention_kernel
from kvferry.kernels.flash_attention.unpack import unpack_launch
from kvferry.kernels.flash_attention.workspace import StepWorkspace
from kvferry.kernels.kv_layer import FLOAT_TYPES, HEAD_DIMS, KvLayer, kind_of
from kvferry.kernels.launch import Launch, chip_of, require


def flash_attention(
    q: torch.Tensor,
    kv: KvLayer,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    workspace: StepWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap(scale * q @ k^T)) @ v over the keys that each query sees. q [T, Hq, D] -> like q.

    See ``reference.flash_attention``. ``plan`` and ``workspace`` must be of this step's lengths and
    window. With a workspace keys and values are first brought there, in the type of ``q``; without
    one, every program converts what it reads.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    chip = chip_of(q.device)
    if workspace is not None:
        require(workspace.elements.dtype is q.dtype, "workspace", f"must be {q.dtype}, as q is")
        unpack_launch(kv, block_tables, workspace, chip).run()
        kv, block_tables = workspace.layer, workspace.tables
    config = config_for(chip, kv, q.dtype, windowed=window is not None)
    require(plan.rows == config.rows, "plan", f"tiles of {plan.rows} rows, not {config.rows}")
    flash_attention_launch(
        q,
        kv,
        block_tables,
        query_starts,
        context_lens,
        plan.tiles,
        out,
        chip,
        scale=scale,
        window=window,
        softcap=softcap,
        config=config,
    ).run()
    return out


def flash_attention_launch(
    q: torch.Tensor,
    kv: KvLayer,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    chip: Chip,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: Config | None = None,
) -> Launch:
    """``tiles`` int32 [num_tiles, 2] as a plan lists them. Raises ValueError naming what does not
    fit.
    """
    _check(q, kv, block_tables, query_starts, context_lens, tiles, out)
    config = config or config_for(chip, kv, q.dtype, windowed=window is not None)
    require(scale > 0, "scale", "must be positive")
    require(window is None or window > 0, "window", "must be positive")
    require(softcap is None or softcap > 0, "softcap", "must be positive")
    num_heads, head_dim = q.shape[1:]
    head = 1 << (head_dim.bit_length() - 1)
    k, v = kv.storage()
    tma = config.uses_tma(chip, kv)
    log2e = math.log2(math.e)
    return Launch(
        kernel=flash_attention_kernel,
        grid=(tiles.shape[0] * num_heads,),
        args={
            "p_q": q,
            "p_k": k,
            "p_v": v,
            "p_k_scale": kv.k_scale,
            "p_v_scale": kv.v_scale,
            "p_out": out,
            "desc_k": _descriptor(k, config.keys, head) if tma else None,
            "desc_v": _descriptor(v, config.keys, head) if tma else None,
            "desc_k_tail": _descriptor(k, config.keys, head_dim - head) if tma else None,
            "desc_v_tail": _descriptor(v, config.keys, head_dim - head) if tma else None,
            "p_tiles": tiles,
            "p_tables": block_tables,
            "p_starts": query_starts,
            "p_context": context_lens,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "block_stride": k.stride(0),
            "token_stride": k.stride(1),
            "head_stride": k.stride(2),
            "table_stride": block_tables.stride(0),
            # tanh(x) = 1 - 2 / (2^(2 log2(e) x) + 1).
            "scale": float(scale * log2e if softcap is None else 2 * log2e * scale / softcap),
            "cap": None if softcap is None else float(softcap * log2e),
            "window": window,
        },
        constants={
            "NUM_HEADS": num_heads,
            "GROUP": num_heads // kv.num_kv_heads,
            "HEAD": head,
            "TAIL": head_dim - head,
            "BLOCK_SIZE": kv.block_size,
            "BLOCK_M": config.rows,
            "BLOCK_N": config.keys,
            "KIND": kind_of(kv.k.dtype, chip),
            "CAPPED": softcap is not None,
            "WINDOWED": window is not None,
            "TMA": tma,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages(chip, kv),
    )


def _descriptor(cache: torch.Tensor, keys: int, width: int) -> Any:
    """Tiles [1, 1, keys, width] of a cache [N, B, H, D] seen as [N, H, B, D]; None for no width."""
    if not width:
        return None
    seen = cache.permute(0, 2, 1, 3)
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), [1, 1, keys, width])


def _check(
    q: torch.Tensor,
    kv: KvLayer,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:
    kv.check()
    require(q.dim() == 3 and q.stride(2) == 1, "q", "must be [T, Hq, D] with contiguous rows")
    require(q.dtype in FLOAT_TYPES, "q", f"no kernel computes in {q.dtype}")
    require(q.shape[2] == kv.head_dim, "q", f"head dimension is not the cache's {kv.head_dim}")
    require(kv.head_dim in HEAD_DIMS, "q", f"head dimension must be one of {HEAD_DIMS}")
    require(q.shape[1] % kv.num_kv_heads == 0, "q", f"heads share {kv.num_kv_heads} KV heads")
    like_q = out.shape == q.shape and out.dtype is q.dtype and out.stride(2) == 1
    require(like_q, "out", "must be like q, with contiguous rows")
    num_seqs = context_lens.shape[0]
    require(block_tables.dim() == 2, "block_tables", "must be [S, blocks]")
    require(block_tables.shape[0] == num_seqs, "block_tables", f"must have {num_seqs} rows")
    require(block_tables.stride(1) == 1, "block_tables", "rows must be contiguous")
    require(query_starts.shape == (num_seqs + 1,), "query_starts", f"must be [{num_seqs + 1}]")
    require(tiles.dim() == 2 and tiles.shape[1] == 2, "tiles", "must be [num_tiles, 2]")
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_starts", query_starts),
        ("context_lens", context_lens),
        ("tiles", tiles),
    ):
        require(tensor.dtype is torch.int32, name, "must be int32")
        require(tensor.dim() == 2 or tensor.is_contiguous(), name, "must be contiguous")
