"""The batch-invariant product in Triton's interpreter: right, and the same for every batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors
from rows_apart import rows_apart

from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip
from kvferry.kernels.launch import next_power_of_2
from kvferry.kernels.matmul import reference, wrapper
from kvferry.kernels.matmul.configs import CANDIDATES, HALF, SINGLE, Family, family_of

# One unit in the last place: a sum near the middle of two neighbours is rounded to either, here and
# in the reference. float32: sums of at most 200 products, each rounded.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    m=st.sampled_from([1, 2, 17, 63, 64, 65, 130, 300]),
    n=st.sampled_from([1, 8, 40, 127, 129, 264]),
    k=st.sampled_from([1, 16, 63, 64, 72, 200]),
    dtype=st.sampled_from(list(BOUNDS)),
    bias=st.booleans(),
)
def test_equals_the_reference(
    seed: int, m: int, n: int, k: int, dtype: torch.dtype, bias: bool
) -> None:
    random = random_tensors(seed)
    x, weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
    b = random(n, dtype=dtype) if bias else None
    # What a sum of such products is like: a single one may be next to nothing.
    scale = (x.double().square() @ weight.double().square().T).sqrt()
    assert_close(wrapper.matmul(x, weight, b), reference.matmul(x, weight, b), BOUNDS, scale)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    m=st.integers(1, 280),
    start=st.integers(0, 70),
    dtype=st.sampled_from(list(BOUNDS)),
    aligned=st.booleans(),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_batch(
    seed: int, m: int, start: int, dtype: torch.dtype, aligned: bool, data: st.DataObject
) -> None:
    """Alone, among others, and moved to another place, which is another row of another tile."""
    random = random_tensors(seed)
    k = 136 if aligned else 133
    x, weight, bias = random(m, k, dtype=dtype), random(136, k, dtype=dtype), random(136)
    bias = bias.to(dtype)
    i = data.draw(st.integers(0, m - 1), label="row")
    moved = torch.cat([random(start, k, dtype=dtype), x[i:]])
    with rows_apart():
        out = wrapper.matmul(x, weight, bias)
        assert torch.equal(wrapper.matmul(x[i : i + 1], weight, bias)[0], out[i])
        assert torch.equal(wrapper.matmul(moved, weight, bias)[start:], out[i:])


def test_rows_of_a_wider_tensor_and_slices_of_a_weight() -> None:
    random = random_tensors(3)
    x, weight = random(5, 3, 64)[:, 1], random(50, 200)[7:, 24:88]
    assert_close(wrapper.matmul(x, weight), reference.matmul(x, weight), BOUNDS)


def test_no_rows() -> None:
    assert wrapper.matmul(torch.empty(0, 8), torch.ones(4, 8)).shape == (0, 4)


def test_nan_stays_in_its_row() -> None:
    x, weight = torch.ones(70, 64), torch.ones(8, 64)
    x[3, 5] = x[69, 63] = torch.nan
    assert wrapper.matmul(x, weight).isnan().any(1).nonzero().flatten().tolist() == [3, 69]


@pytest.mark.parametrize(
    ("x", "weight", "bias", "named"),
    [
        (torch.ones(2, 8).T, torch.ones(4, 2), None, "x"),
        (torch.ones(2, 8, dtype=torch.float64), torch.ones(4, 8), None, "x"),
        (torch.ones(2, 8), torch.ones(4, 7), None, "weight"),
        (torch.ones(2, 8), torch.ones(8, 4).T, None, "weight"),
        (torch.ones(2, 8), torch.ones(4, 8).bfloat16(), None, "weight"),
        (torch.ones(2, 0), torch.ones(4, 0), None, "weight"),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(5), "bias"),
    ],
)
def test_bad_arguments_are_named(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        wrapper.matmul(x, weight, bias)


@pytest.mark.parametrize("chip", [*CHIPS.values(), INTERPRETER], ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_columns_and_steps_do_not_depend_on_the_batch(chip: Chip, dtype: torch.dtype) -> None:
    def fixed(m: int) -> tuple[object, ...]:
        x, weight, out = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape in ((m, 512), (4096, 512), (m, 4096))
        )
        constants = wrapper.matmul_launch(x, weight, None, out, chip).constants
        return tuple(constants[name] for name in ("TMA", "BLOCK_N", "BLOCK_K"))

    assert len({fixed(m) for m in (1, 16, 64, 65, 500, 8192)}) == 1


@pytest.mark.parametrize(
    "family",
    [*HALF.values(), SINGLE, *(family for some in CANDIDATES.values() for family in some)],
    ids=str,
)
def test_families_are_sound(family: Family) -> None:
    heights = [rows.block_m for rows in family.rows]
    assert heights == sorted(set(heights))
    for size in (family.block_n, family.block_k, *heights):
        assert size == next_power_of_2(size) >= 16
    # 16 rows or columns per warp at least, so that no matrix instruction is computed twice.
    assert all(rows.block_m // 16 >= rows.num_warps or family is SINGLE for rows in family.rows)


def test_small_batches_take_short_tiles() -> None:
    family = family_of(torch.bfloat16, CHIPS["H200"])
    assert family.pick(1, 4096, 132).block_m == 64
    assert family.pick(1, 128256, 132).block_m == 64
    assert family.pick(8192, 4096, 132).block_m == 256


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_are_the_same_in_every_height_of_tile(dtype: torch.dtype) -> None:
    random = random_tensors(5)
    x = random(4096, 1024, dtype=dtype).cuda()
    weight = random(4096, 1024, dtype=dtype).cuda()
    out = wrapper.matmul(x, weight)
    for m in (1, 16, 64, 65, 200, 600, 1100, 2000):
        assert torch.equal(wrapper.matmul(x[:m], weight), out[:m])
        assert torch.equal(wrapper.matmul(x[-m:], weight), out[-m:])
    error = (out.double() - reference.matmul(x, weight).double()).abs().max() / out.abs().max()
    assert float(error) <= BOUNDS[dtype]
