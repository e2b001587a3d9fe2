"""One layer of the paged cache as kernels take it, and the element types a cache can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from kvferry.kernels.chips import Chip

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED_TYPES = (torch.int8, torch.float8_e4m3fn)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""What attention has tiles for."""

LEAST_SCALE = 2.0**-126
"""The least normal float32. The inverse of what is much smaller would be infinite."""


class CacheKind(IntEnum):
    """How elements are stored; a constant of the kernels that read or write a cache."""

    FLOAT = 0
    """float32, bfloat16 or float16: stored as it is computed, no scales."""
    INT8 = 1
    """int8 with one float32 scale per token and head."""
    E4M3 = 2
    """FP8 E4M3 with one float32 scale per token and head, converted by the chip."""
    E4M3_BITS = 3
    """The same bytes, converted with integer operations: for chips that lack the instruction."""


@dataclass(frozen=True, slots=True, eq=False)
class KvLayer:
    """Shapes: N num_blocks, B block_size, H num_kv_heads, D head_dim.

    Value of an element: ``k[n, b, h, d] * k_scale[n, b, h]``. One scale per token and head:
    a token's scale is fixed when it is written, so that appending touches nothing written before.
    """

    k: torch.Tensor
    """[N, B, H, D], last dimension contiguous; one of FLOAT_TYPES or QUANTISED_TYPES."""
    v: torch.Tensor
    """Like ``k``, same strides."""
    k_scale: torch.Tensor | None = None
    """float32 [N, B, H]; None for the float types."""
    v_scale: torch.Tensor | None = None

    @property
    def is_quantised(self) -> bool:
        return self.k.dtype in QUANTISED_TYPES

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    def storage(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``k`` and ``v`` in a type that Triton takes on every chip: FP8 as uint8."""
        if self.k.dtype is torch.float8_e4m3fn:
            return self.k.view(torch.uint8), self.v.view(torch.uint8)
        return self.k, self.v

    def check(self) -> None:
        """Raise ValueError naming the tensor that does not fit."""
        if self.k.dtype not in FLOAT_TYPES + QUANTISED_TYPES:
            raise ValueError(f"kv.k: no kernel reads {self.k.dtype}")
        if (self.v.shape, self.v.stride(), self.v.dtype) != (
            self.k.shape,
            self.k.stride(),
            self.k.dtype,
        ):
            raise ValueError("kv.v: shape, strides or dtype differ from kv.k")
        if self.k.dim() != 4 or self.k.stride(3) != 1:
            raise ValueError("kv.k: must be [N, B, H, D] with a contiguous last dimension")
        # Kernels number blocks with 64 bits, and what is within a block with 32.
        _, token_stride, head_stride, _ = self.k.stride()
        if self.block_size * token_stride + self.num_kv_heads * head_stride >= 2**31:
            raise ValueError("kv.k: 2^31 elements lie between the first and last of a block")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if (scale is not None) != self.is_quantised:
                raise ValueError(f"kv.{name}: must be given for int8 and FP8, and for them alone")
            if scale is not None and (
                scale.shape != self.k.shape[:3]
                or scale.dtype is not torch.float32
                or not scale.is_contiguous()
            ):
                raise ValueError(
                    f"kv.{name}: must be float32 {tuple(self.k.shape[:3])}, contiguous"
                )


def kind_of(dtype: torch.dtype, chip: Chip) -> int:
    """The KIND constant for a cache of ``dtype`` on ``chip``."""
    if dtype is torch.int8:
        return CacheKind.INT8.value
    if dtype is torch.float8_e4m3fn:
        return (CacheKind.E4M3 if chip.has_native_e4m3 else CacheKind.E4M3_BITS).value
    return CacheKind.FLOAT.value


def dequantised(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float32 values of cache elements [..., H, D] with scales [..., H] or None."""
    values = x.to(torch.float32)
    return values if scale is None else values * scale[..., None]


def quantised(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements [..., H, D] as a cache of ``dtype`` keeps them, and their scales [..., H].

    Symmetric: the largest magnitude of a token's head maps to the largest value of the type (448
    for FP8 E4M3, 127 for int8, which is rounded half to even). A head of zeros has scale 0, and so
    has one whose scale would be below ``LEAST_SCALE``. A NaN makes its head's scale NaN.
    """
    if dtype in FLOAT_TYPES:
        return x.to(dtype), None
    x32 = x.to(torch.float32)
    largest = 127.0 if dtype is torch.int8 else 448.0
    scale = x32.abs().amax(-1) / largest
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    values = (x32 * inverse[..., None]).clamp(-largest, largest)
    return (values.round() if dtype is torch.int8 else values).to(dtype), scale
