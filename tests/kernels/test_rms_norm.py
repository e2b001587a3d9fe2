"""RMSNorm in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors

from kvferry.kernels.rms_norm import reference, wrapper

torch.set_num_threads(1)

# One rounding of the output, one of the normed value before the weight.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = st.sampled_from(list(BOUNDS))
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    num_tokens=st.integers(1, 5),
    # 1000 and 1024: two rows per program; 2049: one, and a block of which half is masked.
    size=st.sampled_from([1, 3, 64, 100, 576, 1000, 1024, 2049]),
    dtype=DTYPES,
    add=st.booleans(),
    unit_offset=st.booleans(),
)
def test_equals_the_reference(
    seed: int, num_tokens: int, size: int, dtype: torch.dtype, add: bool, unit_offset: bool
) -> None:
    random = random_tensors(seed)
    x, weight = random(num_tokens, size, dtype=dtype), random(size, dtype=dtype)
    if not add:
        out = wrapper.rms_norm(x, weight, 1e-5, unit_offset)
        assert_close(out, reference.rms_norm(x, weight, 1e-5, unit_offset), BOUNDS)
        return
    residual = random(num_tokens, size, dtype=dtype)
    out, total = wrapper.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    assert torch.equal(total, expected_total)
    assert_close(out, expected, BOUNDS)
    # The next layer reads the rounded sum, and that is what is normed.
    assert torch.equal(out, wrapper.rms_norm(total, weight, 1e-5, unit_offset))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(
    ("size", "dtype"), [(8200, torch.float32), (16400, torch.bfloat16), (65536, torch.float16)]
)
def test_long_rows_go_in_pieces(
    size: int, dtype: torch.dtype, unit_offset: bool, add: bool, seeded: int
) -> None:
    random = random_tensors(seeded)
    x, residual = random(2, size, dtype=dtype), random(2, size, dtype=dtype)
    weight = random(size, dtype=dtype)
    if add:
        out, total = wrapper.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
        assert torch.equal(total, residual + x)
        assert torch.equal(out, wrapper.rms_norm(total, weight, 1e-5, unit_offset))
    else:
        total = x
        out = wrapper.rms_norm(x, weight, 1e-5, unit_offset)
    assert_close(out, reference.rms_norm(total, weight, 1e-5, unit_offset), BOUNDS)


@settings(max_examples=10)
@given(seed=SEEDS, size=st.sampled_from([48, 576, 3000]), dtype=DTYPES, data=st.data())
def test_a_row_is_the_same_bit_for_bit_in_every_batch(
    seed: int, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    random = random_tensors(seed)
    x, residual = random(7, size, dtype=dtype), random(7, size, dtype=dtype)
    weight = random(size, dtype=dtype)
    out, _ = wrapper.add_rms_norm(x, residual, weight, 1e-5)
    rows = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    for alone in (rows, rows[:1]):
        part, _ = wrapper.add_rms_norm(x[alone], residual[alone], weight, 1e-5)
        assert torch.equal(part, out[alone])


def test_a_launch_depends_on_the_number_of_rows_in_its_grid_alone() -> None:
    """Tiles and warps, which fix the order of sums, are those of the row's size."""

    def launch(num_rows: int) -> tuple[object, ...]:
        x, out = (torch.empty(num_rows, 576, device="meta") for _ in range(2))
        made = wrapper.rms_norm_launch(
            x, None, torch.empty(576, device="meta"), 1e-5, out, None, wrapper.chip_of(CPU)
        )
        return made.kernel, made.constants, made.num_warps, made.num_stages

    assert launch(1) == launch(64) == launch(8192)


CPU = torch.device("cpu")


def test_the_normed_value_is_rounded_before_the_weight(seeded: int) -> None:
    """What checkpoints of Llama were trained with; Gemma's is rounded once. Bits of the reference,
    but where another order of the sum moves a value across a rounding boundary.
    """
    random = random_tensors(seeded)
    x, weight = random(4, 1000, dtype=torch.bfloat16), random(1000, dtype=torch.bfloat16)
    for unit_offset in (False, True):
        out = wrapper.rms_norm(x, weight, 1e-5, unit_offset)
        expected = reference.rms_norm(x, weight, 1e-5, unit_offset)
        assert (out != expected).float().mean() < 0.01


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18])
def test_extreme_rows_stay_finite(value: float) -> None:
    x, weight = torch.full((2, 40), value), torch.ones(40)
    out = wrapper.rms_norm(x, weight, 1e-6)
    assert torch.isfinite(out).all()
    assert_close(out, reference.rms_norm(x, weight, 1e-6), BOUNDS)


def test_rows_of_a_wider_tensor() -> None:
    wide = random_tensors(1)(4, 3, 32)
    rows, weight = wide[:, 1], torch.ones(32)
    assert_close(
        wrapper.rms_norm(rows, weight, 1e-6), reference.rms_norm(rows, weight, 1e-6), BOUNDS
    )
    out, total = wrapper.add_rms_norm(rows, torch.ones(4, 32), weight, 1e-6)
    assert torch.equal(total, rows + 1)
    assert_close(out, reference.rms_norm(rows + 1, weight, 1e-6), BOUNDS)


def test_leading_dimensions_are_kept() -> None:
    x, weight = random_tensors(2)(2, 3, 16), torch.ones(16)
    assert_close(wrapper.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), BOUNDS)


def test_no_tokens() -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    assert wrapper.rms_norm(x, weight, 1e-5).shape == (0, 8)
    assert [part.shape for part in wrapper.add_rms_norm(x, x, weight, 1e-5)] == [(0, 8), (0, 8)]


ROWS = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("named", "x", "residual", "weight"),
    [
        ("weight", ROWS, ROWS, torch.ones(7)),
        ("weight", ROWS, ROWS, torch.ones(16)[::2]),
        ("weight", ROWS, ROWS, torch.ones(8, dtype=torch.float16)),
        ("x", torch.ones(8, 2).T, ROWS, torch.ones(8)),
        ("x", torch.ones(2, 0), torch.ones(2, 0), torch.ones(0)),
        ("x", torch.ones(1, 65537), torch.ones(1, 65537), torch.ones(65537)),
        ("x", ROWS.double(), ROWS.double(), torch.ones(8).double()),
        ("residual", ROWS, torch.ones(3, 8), torch.ones(8)),
        ("residual", ROWS, torch.ones(2, 16)[:, ::2], torch.ones(8)),
        ("residual", ROWS, ROWS.half(), torch.ones(8)),
    ],
)
def test_bad_arguments_are_named(
    named: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=rf"^{named}:"):
        wrapper.add_rms_norm(x, residual, weight, 1e-5)
