"""Products with 4 and 8 bit weights in Triton's interpreter against the reference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors

from kvferry.kernels.quant_matmul import reference, wrapper
from kvferry.kernels.quant_matmul.layout import QuantWeight

# One rounding of the output (half an ulp: 2^-9, 2^-12). Products of codes and x are exact in
# float32, and the sums of a few hundred of them are off by less than 2^-16.
BOUNDS = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
FORMATS = [(4, False), (4, True), (8, False)]


def random_weight(
    seed: int,
    n: int,
    k: int,
    bits: int,
    asymmetric: bool,
    group_size: int,
    scale_dtype: torch.dtype,
) -> QuantWeight:
    return reference.quantise(
        random_tensors(seed + 1)(n, k), bits, group_size, asymmetric, scale_dtype
    )


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 33),
    n=st.sampled_from([1, 24, 127, 128, 136, 200]),
    groups=st.sampled_from([1, 3, 5]),
    group_size=st.sampled_from([32, 64, 128]),
    bits_asymmetric=st.sampled_from(FORMATS),
    dtype=st.sampled_from(list(BOUNDS)),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    bias=st.booleans(),
)
def test_equals_the_reference(
    seed: int,
    m: int,
    n: int,
    groups: int,
    group_size: int,
    bits_asymmetric: tuple[int, bool],
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    bias: bool,
) -> None:
    random = random_tensors(seed)
    k = groups * group_size
    weight = random_weight(seed, n, k, *bits_asymmetric, group_size, scale_dtype)
    x = random(m, k, dtype=dtype)
    b = random(n, dtype=dtype) if bias else None
    assert_close(wrapper.quant_matmul(x, weight, b), reference.quant_matmul(x, weight, b), BOUNDS)
