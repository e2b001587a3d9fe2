"""RMSNorm in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors

from kvferry.kernels.rms_norm import reference, wrapper

# One rounding of the output, one of the normed value before the weight.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(1, 5),
    size=st.sampled_from([1, 3, 64, 100, 576, 1000]),
    dtype=st.sampled_from(list(BOUNDS)),
    add=st.booleans(),
)
def test_equals_the_reference(
    seed: int, num_tokens: int, size: int, dtype: torch.dtype, add: bool
) -> None:
    random = random_tensors(seed)
    x, weight = random(num_tokens, size, dtype=dtype), random(size, dtype=dtype)
    if not add:
        assert_close(wrapper.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), BOUNDS)
        return
    residual = random(num_tokens, size, dtype=dtype)
    out, total = wrapper.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(out, expected, BOUNDS)


def test_rows_of_a_wider_tensor() -> None:
    wide = random_tensors(1)(4, 3, 32)
    rows, weight = wide[:, 1], torch.ones(32)
    assert_close(
        wrapper.rms_norm(rows, weight, 1e-6), reference.rms_norm(rows, weight, 1e-6), BOUNDS
    )


def test_no_tokens() -> None:
    assert wrapper.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


@pytest.mark.parametrize(
    ("weight", "named"), [(torch.ones(7), "weight"), (torch.ones(16)[::2], "weight")]
)
def test_bad_arguments_are_named(weight: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        wrapper.rms_norm(torch.ones(2, 8), weight, 1e-5)
