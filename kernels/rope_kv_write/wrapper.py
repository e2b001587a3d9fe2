"""RoPE, QK norm and cache write on the GPU: same function and meaning as ``reference``."""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.kv_layer import FLOAT_TYPES, KvLayer, kind_of
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require
from kvferry.kernels.rope_kv_write.kernel import rope_kv_write_kernel

TILE = 2048
"""Elements of a program, of queries or of keys: 16 a thread."""


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: KvLayer,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate q and k, write k and v to their slots of the cache; the rotated q, [T, Hq, D].

    See ``reference``. A slot past the cache, which is a caller's error, is not written.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    chip = chip_of(q.device)
    rope_kv_write_launch(q, k, v, cos, sin, slots, kv, q_norm, k_norm, eps, out, chip).run()
    return out


def rope_kv_write_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: KvLayer,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    chip: Chip,
) -> Launch:
    """Shapes as in ``reference``; out [T, Hq, D]. Raises ValueError naming what does not fit."""
    _check_heads(q, k, v, kv, out)
    _check_positions(q, cos, sin, slots)
    num_tokens, num_heads, head_dim = q.shape
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        fits = weight is None or (
            weight.shape == (head_dim,) and weight.is_contiguous() and weight.dtype == q.dtype
        )
        require(fits, name, f"must be {q.dtype} [{head_dim}], contiguous")
    pairs = next_power_of_2(head_dim // 2)
    rows = max(1, TILE // (2 * pairs))
    k_cache, v_cache = kv.storage()
    programs = -(-num_tokens * num_heads // rows) + -(-num_tokens * kv.num_kv_heads // rows)
    return Launch(
        kernel=rope_kv_write_kernel,
        grid=(programs,),
        args={
            "p_q": q,
            "p_k": k,
            "p_v": v,
            "p_cos": cos,
            "p_sin": sin,
            "p_slots": slots,
            "p_q_norm": q_norm,
            "p_k_norm": k_norm,
            "p_out": out,
            "p_k_cache": k_cache,
            "p_v_cache": v_cache,
            "p_k_scale": kv.k_scale,
            "p_v_scale": kv.v_scale,
            "num_tokens": num_tokens,
            "num_slots": k_cache.shape[0] * kv.block_size,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "k_token_stride": k.stride(0),
            "k_head_stride": k.stride(1),
            "v_token_stride": v.stride(0),
            "v_head_stride": v.stride(1),
            "block_stride": k_cache.stride(0),
            "offset_stride": k_cache.stride(1),
            "head_stride": k_cache.stride(2),
            "eps": eps,
        },
        constants={
            "HQ": num_heads,
            "HKV": kv.num_kv_heads,
            "D": head_dim,
            "ROTARY": 2 * cos.shape[1],
            # A constant, so that rows of 40 angles are seen to be aligned to 16 bytes.
            "ANGLE_STRIDE": cos.stride(0),
            "BLOCK_SIZE": kv.block_size,
            "KIND": kind_of(kv.k.dtype, chip),
            "Q_NORM": q_norm is not None,
            "K_NORM": k_norm is not None,
            "ROWS": rows,
            "PAIRS": pairs,
        },
        num_warps=4,
    )


def _check_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvLayer, out: torch.Tensor
) -> None:
    kv.check()
    require(q.dtype in FLOAT_TYPES, "q", f"no kernel reads {q.dtype}")
    heads = {"q": q.shape[1:2], "k": (kv.num_kv_heads,), "v": (kv.num_kv_heads,)}
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = (q.shape[0], *heads[name], kv.head_dim)
        fits = x.shape == shape and x.dtype == q.dtype and x.stride(2) == 1
        require(fits, name, f"must be {q.dtype} {list(shape)}, the last dimension contiguous")
    require(kv.head_dim % 2 == 0, "q", f"heads of {kv.head_dim} elements have no pairs")
    fits = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    require(fits, "out", "must be like q, contiguous")


def _check_positions(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
) -> None:
    num_tokens, most = q.shape[0], q.shape[2] // 2
    for name, x in (("cos", cos), ("sin", sin)):
        fits = x.dim() == 2 and x.shape[0] == num_tokens and 0 < x.shape[1] <= most
        require(fits and x.stride(1) == 1, name, f"must be [{num_tokens}, 1 to {most}], contiguous")
        require(x.dtype in FLOAT_TYPES, name, f"no kernel reads {x.dtype}")
    alike = (sin.shape, sin.stride(), sin.dtype) == (cos.shape, cos.stride(), cos.dtype)
    require(alike, "sin", "shape, strides or dtype differ from cos")
    fits = slots.shape == (num_tokens,) and slots.is_contiguous() and slots.dtype is torch.int64
    require(fits, "slots", f"must be int64 [{num_tokens}], contiguous")
