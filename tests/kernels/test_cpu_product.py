"""The CPU's product with weights in panels: right, and the same for a row whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.cpu.library import CpuOps, Lanes
from kvferry.kernels.cpu.linear import linear, product
from kvferry.kernels.cpu.panels import can_be_packed, narrowed, packed, unpacked


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_close(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Within the bound of a sum of K products, each rounded once: K * 2^-24 of their magnitudes."""
    most = exact(x.abs(), w.abs(), None if bias is None else bias.abs())
    assert bool(((y - exact(x, w, bias)).abs() <= (w.shape[1] + 1) * 2.0**-24 * most).all())


@pytest.mark.parametrize("rows", range(1, 41))
def test_every_number_of_rows(cpu: CpuOps, rows: int) -> None:
    x, w, bias = torch.randn(rows, 37), torch.randn(80, 37), torch.randn(80)
    assert_close(product(cpu, x, packed(w), bias), x, w, bias)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 1, 16), (2, 1, 48), (3, 576, 192), (130, 33, 16), (29, 1536, 48), (14, 7, 32), (0, 5, 16)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_shapes(cpu: CpuOps, rows: int, inputs: int, outputs: int, with_bias: bool) -> None:
    x, w = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if with_bias else None
    y = product(cpu, x, packed(w), bias)
    assert y.shape == (rows, outputs)
    assert_close(y, x, w, bias)


def test_inputs_may_have_strides_and_more_dimensions(cpu: CpuOps) -> None:
    w = torch.randn(32, 24)
    wide = torch.randn(5, 60)
    for x in (wide[:, 7:31], wide[::2, :24], torch.randn(24, 5).T):
        assert_close(product(cpu, x, packed(w)), x, w, None)
    x = torch.randn(2, 3, 24)
    y = product(cpu, x, packed(w))
    assert y.shape == (2, 3, 32)
    assert torch.equal(y.flatten(0, 1), product(cpu, x.flatten(0, 1), packed(w)))


def test_both_kinds_of_cpu_and_any_threads_give_the_same_bits(
    cpu: CpuOps, cpu_library: object, two_threads: None
) -> None:
    x, panels = torch.randn(33, 96), packed(torch.randn(176, 96))
    torch.set_num_threads(1)
    alone = product(cpu, x, panels)
    torch.set_num_threads(2)
    assert torch.equal(product(cpu, x, panels), alone)
    other = CpuOps(cpu_library, Lanes.AVX2)  # type: ignore[arg-type]
    assert torch.equal(product(other, x, panels), alone)


@given(data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    rows, inputs = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 80))
    panels = packed(torch.randn(16 * data.draw(st.integers(1, 5)), inputs))
    x, row = torch.randn(rows, inputs), data.draw(st.integers(0, rows - 1))
    assert torch.equal(linear(x, panels)[row], linear(x[row : row + 1], panels)[0])


def test_parts_of_panels_are_views_that_give_the_parts_of_products(cpu: CpuOps) -> None:
    x, w = torch.randn(9, 50), torch.randn(96, 50)
    panels = packed(w)
    whole = product(cpu, x, panels)
    some = narrowed(panels, 0, 32, 48)
    assert some.data_ptr() == panels[2].data_ptr()
    assert torch.equal(product(cpu, x, some), whole[:, 32:80])
    inputs = narrowed(panels, 1, 11, 20)
    assert inputs.data_ptr() == panels[0, 11].data_ptr()
    assert_close(product(cpu, x[:, 11:31], inputs), x[:, 11:31], w[:, 11:31], None)


def test_parts_that_are_no_whole_panels_are_plain() -> None:
    w = torch.randn(48, 10)
    assert torch.equal(narrowed(packed(w), 0, 5, 20), w[5:25])
    assert torch.equal(narrowed(w, 0, 5, 20), w[5:25])
    assert torch.equal(narrowed(w, 1, 2, 3), w[:, 2:5])


def test_packing_loses_nothing() -> None:
    w = torch.randn(64, 7)
    assert torch.equal(unpacked(packed(w)), w)
    assert can_be_packed((64, 7), torch.float32)
    assert not can_be_packed((63, 7), torch.float32)
    assert not can_be_packed((64, 7), torch.bfloat16)


def test_plain_weights_are_the_vendors(two_threads: None) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w, bias = (torch.randn(*size).to(dtype) for size in ((3, 8), (5, 8), (5,)))
        assert torch.equal(linear(x, w, bias), torch.nn.functional.linear(x, w, bias))


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 5), torch.ones(1, 4, 16), None),
        (torch.ones(2, 4).double(), torch.ones(1, 4, 16), None),
        (torch.ones(2, 4), torch.ones(1, 4, 16).double(), None),
        (torch.ones(2, 4), torch.ones(1, 4, 8), None),
        (torch.ones(2, 4), torch.ones(1, 4, 32)[:, :, ::2], None),
        (torch.ones(2, 4), torch.ones(1, 4, 16), torch.ones(15)),
        (torch.ones(2, 4), torch.ones(1, 4, 16), torch.ones(32)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(
    cpu: CpuOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with pytest.raises(ValueError, match=r"must be|panels"):
        product(cpu, x, weight, bias)
