"""Gated units in Triton's interpreter against torch."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import random_tensors

from kvferry.kernels.gated import reference, wrapper

torch.set_num_threads(1)

# One rounding of the activation, one of the product.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


class Layout(Enum):
    APART = "two tensors"
    FUSED = "halves of one"
    MIXED = "one of them strided"


Unit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
UNITS: dict[str, tuple[Unit, Unit]] = {
    "swiglu": (wrapper.swiglu, reference.swiglu),
    "geglu, tanh": (wrapper.geglu, reference.geglu),
    "geglu, exact": (
        partial(wrapper.geglu, approximate=False),
        partial(reference.geglu, approximate=False),
    ),
}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(1, 4),
    # 4100: three programs a row, the last one nearly empty.
    size=st.sampled_from([1, 7, 64, 100, 1536, 4100]),
    dtype=st.sampled_from(list(BOUNDS)),
    unit=st.sampled_from(list(UNITS)),
    layout=st.sampled_from(Layout),
)
def test_equals_the_reference(
    seed: int, num_tokens: int, size: int, dtype: torch.dtype, unit: str, layout: Layout
) -> None:
    random = random_tensors(seed)
    gate, up = (random(num_tokens, size, dtype=dtype) for _ in range(2))
    if layout is Layout.FUSED:
        gate, up = random(num_tokens, 2 * size, dtype=dtype).chunk(2, dim=-1)
    elif layout is Layout.MIXED:
        up = random(num_tokens, 3 * size, dtype=dtype)[:, size : 2 * size]
    gate.mul_(3)
    kernel, plain = UNITS[unit]
    out = kernel(gate, up)
    assert out.is_contiguous()
    expected = plain(gate, up)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    # Of gate times up: where a unit closes, torch's 1 + tanh leaves nothing of a small result.
    largest = (gate.double() * up.double()).abs().max()
    assert (out.double() - expected.double()).abs().max() <= BOUNDS[dtype] * largest


@pytest.mark.parametrize("unit", UNITS)
def test_the_whole_range_of_the_gate(unit: str) -> None:
    """No overflow where the exponential has one, and each value to float32's precision."""
    gate = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([-1e4, 1e4, -1e12, 1e12, 0.0])))
    kernel, plain = UNITS[unit]
    up = torch.ones(1, len(gate))
    out, expected = (f(gate[None], up) for f in (kernel, plain))
    exact = plain(gate[None].double(), up.double())
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


def test_the_activation_is_rounded_before_the_product(seeded: int) -> None:
    random = random_tensors(seeded)
    gate, up = (random(4, 512, dtype=torch.bfloat16) for _ in range(2))
    activated = wrapper.swiglu(gate, torch.ones_like(up))
    assert torch.equal(wrapper.swiglu(gate, up), activated * up)


@pytest.mark.parametrize("unit", UNITS)
def test_no_tokens(unit: str) -> None:
    assert UNITS[unit][0](torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)


ROWS = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("named", "gate", "up"),
    [
        ("gate", torch.ones(8, 2).T, ROWS),
        ("gate", ROWS.double(), ROWS.double()),
        ("gate", torch.ones(8), torch.ones(8)),
        ("gate", torch.ones(2, 0), torch.ones(2, 0)),
        ("up", ROWS, torch.ones(8, 2).T),
        ("up", ROWS, torch.ones(2, 9)),
        ("up", ROWS, torch.ones(3, 8)),
        ("up", ROWS, ROWS.half()),
    ],
)
def test_bad_arguments_are_named(named: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"^{named}:"):
        wrapper.swiglu(gate, up)
