"""Products with 4 and 8 bit weights in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors
from rows_apart import rows_apart

from kvferry.kernels.chips import INTERPRETER
from kvferry.kernels.quant_matmul import reference, wrapper
from kvferry.kernels.quant_matmul.configs import CANDIDATES
from kvferry.kernels.quant_matmul.layout import QuantWeight, by_unit, pack

# One unit in the last place: products of codes and x are exact in float32 and sums of a few hundred
# are off by less than 2^-16, but near the middle of two neighbours that decides the rounding.
BOUNDS = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
FORMATS = [(4, False), (4, True), (8, False)]


def weight_of_codes(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> QuantWeight:
    """Codes [N, K], scales and zeros [N, K / G]."""
    group_size = codes.shape[1] // scales.shape[1]
    made = QuantWeight(
        packed=pack(codes, bits),
        scales=by_unit(scales, group_size),
        zeros=None if zeros is None else by_unit(zeros, group_size),
        bits=bits,
        group_size=group_size,
        num_inputs=codes.shape[1],
    )
    made.check()
    return made


def random_weight(
    seed: int, n: int, k: int, bits: int, asymmetric: bool, group_size: int
) -> QuantWeight:
    """Every code that the format has, -128 too."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator)
    scales = torch.randn(n, k // group_size, generator=generator).to(torch.float16)
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8)
    return weight_of_codes(codes, scales, zeros if asymmetric else None, bits)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 33),
    n=st.sampled_from([1, 24, 127, 128, 136, 200]),
    groups=st.sampled_from([1, 3, 5]),
    group_size=st.sampled_from([32, 64, 128]),
    bits_asymmetric=st.sampled_from(FORMATS),
    dtype=st.sampled_from(list(BOUNDS)),
    bias=st.booleans(),
    batch_invariant=st.booleans(),
)
def test_equals_the_reference(
    seed: int,
    m: int,
    n: int,
    groups: int,
    group_size: int,
    bits_asymmetric: tuple[int, bool],
    dtype: torch.dtype,
    bias: bool,
    batch_invariant: bool,
) -> None:
    random = random_tensors(seed)
    k = groups * group_size
    weight = random_weight(seed, n, k, *bits_asymmetric, group_size)
    # What lies beside x must not be read into the sum: NaN.
    wide = torch.full((m + 1, k + 40), torch.nan, dtype=dtype)
    wide[:m, :k] = random(m, k, dtype=dtype)
    x, b = wide[:m, :k], random(n, dtype=dtype) if bias else None
    out = wrapper.quant_matmul(x, weight, b, batch_invariant)
    assert_close(out, reference.quant_matmul(x, weight, b), BOUNDS)


def assert_exact_values(
    weight: QuantWeight, dtype: torch.dtype, device: str, batch_invariant: bool
) -> None:
    """x of one 1 per row picks the weight's values one by one: they must be exact."""
    moved = QuantWeight(
        packed=weight.packed.to(device),
        scales=weight.scales.to(device),
        zeros=None if weight.zeros is None else weight.zeros.to(device),
        bits=weight.bits,
        group_size=weight.group_size,
        num_inputs=weight.num_inputs,
    )
    x = torch.eye(weight.num_inputs, dtype=dtype, device=device)
    expected = reference.dequantise(weight).T.to(dtype)
    for rows in x.split([8, 16, 32, weight.num_inputs - 56]):
        out = wrapper.quant_matmul(rows, moved, None, batch_invariant).cpu()
        first = int(rows[0].argmax())
        assert torch.equal(out, expected[first : first + len(rows)])


def exact_cases() -> list[tuple[int, bool, int]]:
    return [(bits, zero, size) for bits, zero in FORMATS for size in (32, 64, 128)]


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("bits", "asymmetric", "group_size"), exact_cases())
def test_every_code_has_its_exact_value(
    bits: int, asymmetric: bool, group_size: int, dtype: torch.dtype
) -> None:
    weight = random_weight(group_size, 40, 128, bits, asymmetric, group_size)
    assert_exact_values(weight, dtype, "cpu", False)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("bits", "asymmetric", "group_size"), exact_cases())
def test_every_code_has_its_exact_value_on_the_gpu(
    bits: int, asymmetric: bool, group_size: int, dtype: torch.dtype, batch_invariant: bool
) -> None:
    """There the codes are unpacked by other instructions than in the interpreter."""
    weight = random_weight(group_size, 200, 640, bits, asymmetric, group_size)
    assert_exact_values(weight, dtype, "cuda", batch_invariant)


@pytest.mark.parametrize(("bits", "code"), [(4, 0), (4, 15), (8, -128), (8, 127)])
@pytest.mark.parametrize("zero", [None, 0, 15])
def test_extreme_codes_and_scales(bits: int, code: int, zero: int | None) -> None:
    if bits == 8 and zero is not None:
        return
    codes = torch.full((16, 384), code)
    scales = torch.tensor([0.0, 65504.0, 2.0**-24]).to(torch.float16).repeat(16, 1)
    zeros = None if zero is None else torch.full((16, 3), zero, dtype=torch.uint8)
    weight = weight_of_codes(codes, scales, zeros, bits)
    x = torch.zeros(3, 384, dtype=torch.bfloat16)
    x[0, :128], x[1, 200], x[2, 300] = 1e30, 1.0, 1.0
    out = wrapper.quant_matmul(x, weight)
    assert torch.equal(out, reference.quant_matmul(x, weight))
    assert not out[0].any()


@settings(max_examples=3)
@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 140),
    start=st.integers(0, 64),
    bits=st.sampled_from([4, 8]),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_batch(
    seed: int, m: int, start: int, bits: int, data: st.DataObject
) -> None:
    """Alone with its splits summed from memory, and in batches that sum them in one program."""
    random = random_tensors(seed)
    weight = random_weight(seed, 72, 640, bits, False, 128)
    x, bias = random(m, 640, dtype=torch.bfloat16), random(72, dtype=torch.bfloat16)
    i = data.draw(st.integers(0, m - 1), label="row")
    moved = torch.cat([random(start, 640, dtype=torch.bfloat16), x[i:]])
    with rows_apart():
        out = wrapper.quant_matmul(x, weight, bias, True)
        assert torch.equal(wrapper.quant_matmul(x[i : i + 1], weight, bias, True)[0], out[i])
        assert torch.equal(wrapper.quant_matmul(moved, weight, bias, True)[start:], out[i:])


def test_splits_are_summed_in_both_ways() -> None:
    """The test above compares what it says: a small batch has two launches, a large one has one."""
    weight = random_weight(1, 72, 640, 4, False, 128)

    def num_launches(m: int) -> int:
        x, out = torch.zeros(m, 640).bfloat16(), torch.zeros(m, 72).bfloat16()
        launches = wrapper.quant_matmul_launches(
            x, weight, None, out, INTERPRETER, batch_invariant=True
        )
        assert launches[0].args["num_splits"] == 2
        return len(launches)

    assert (num_launches(1), num_launches(140)) == (2, 1)


@pytest.mark.parametrize(("m", "other"), [(1, 8), (9, 16)])
def test_a_row_is_the_same_within_a_bucket(m: int, other: int) -> None:
    random = random_tensors(m)
    weight = random_weight(m, 136, 320, 4, True, 64)
    x = random(other, 320, dtype=torch.float16)
    with rows_apart():
        fewer, more = wrapper.quant_matmul(x[:m], weight), wrapper.quant_matmul(x, weight)
    assert torch.equal(fewer, more[:m])


@pytest.mark.parametrize("tile", CANDIDATES[:: len(CANDIDATES) // 4], ids=str)
def test_candidates_of_tuning(tile: object) -> None:
    weight = random_weight(4, 136, 640, 4, True, 128)
    x = random_tensors(4)(11, 640, dtype=torch.bfloat16)
    out = torch.empty(11, 136, dtype=torch.bfloat16)
    for launch in wrapper.quant_matmul_launches(x, weight, None, out, INTERPRETER, tile=tile):
        launch.run()
    assert_close(out, reference.quant_matmul(x, weight), BOUNDS)


def test_no_rows() -> None:
    weight = random_weight(5, 24, 128, 4, False, 128)
    assert wrapper.quant_matmul(torch.empty(0, 128).bfloat16(), weight).shape == (0, 24)


@pytest.mark.parametrize(
    ("x", "bias", "named"),
    [
        (torch.ones(2, 128), None, "x"),
        (torch.ones(2, 127).half(), None, "x"),
        (torch.ones(128, 2).half().T, None, "x"),
        (torch.ones(128).half(), None, "x"),
        (torch.ones(2, 128).half(), torch.ones(23), "bias"),
    ],
)
def test_bad_arguments_are_named(x: torch.Tensor, bias: torch.Tensor | None, named: str) -> None:
    weight = random_weight(6, 24, 128, 4, False, 128)
    with pytest.raises(ValueError, match=f"^{named}:"):
        wrapper.quant_matmul(x, weight, bias)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_reference_takes_the_rows_of_a_large_weight_in_order(asymmetric: bool) -> None:
    weight = random_weight(1, reference.ROWS + 40, 128, 4, asymmetric, 64)
    x = random_tensors(2)(3, 128, dtype=torch.float16)
    whole = x.double() @ reference.dequantise(weight, torch.float64).T
    assert torch.equal(reference.quant_matmul(x, weight), whole.to(torch.float16))
