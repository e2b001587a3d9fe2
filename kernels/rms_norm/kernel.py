"""RMSNorm with an optional residual sum, one row of hidden states per program."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import narrow


@triton.jit
def rms_norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_total,
    x_stride,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = x + residual (ADD); out = weight * total / sqrt(mean(total^2) + eps)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < size
    b_x = tl.load(p_x + i_row * x_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    if ADD:
        b_x += tl.load(p_residual + i_row * size + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_total = narrow(b_x, p_total.dtype.element_ty)
        tl.store(p_total + i_row * size + o_c, b_total, mask=m_c)
        # The norm is of what the next layer will read: the rounded sum.
        b_x = b_total.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + eps)
    b_normed = narrow(b_x * b_scale, p_x.dtype.element_ty).to(tl.float32)
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_out = narrow(b_normed * b_weight, p_out.dtype.element_ty)
    tl.store(p_out + i_row * size + o_c, b_out, mask=m_c)
