"""Rotation and cache write in Triton's interpreter against the reference, the whole cache compared.

A NaN or a loud pattern lies wherever nothing should be written, and where nothing should be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors

from kvferry.kernels.kv_layer import FLOAT_TYPES, QUANTISED_TYPES, KvLayer, dequantised
from kvferry.kernels.rope_kv_write import reference, wrapper

torch.set_num_threads(1)

# One rounding after the rotation; with a norm two more before it, each carried into both products.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of one call."""

    num_tokens: int = 5
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    rotary: int | None = None
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    angles: torch.dtype = torch.float32
    q_norm: bool = False
    k_norm: bool = False


class Inputs:
    """q, k and v are slices of one projection whose other columns hold NaN, or for odd seeds three
    tensors with strides of their own.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        random = random_tensors(seed)
        generator = torch.Generator().manual_seed(seed)
        heads = (shape.group * shape.num_kv_heads, shape.num_kv_heads, shape.num_kv_heads)
        projection = torch.full(
            (shape.num_tokens, sum(heads) + 3, shape.head_dim), torch.nan, dtype=shape.dtype
        )
        projection[:, 1:-2] = random(
            shape.num_tokens, sum(heads), shape.head_dim, dtype=shape.dtype
        )
        self.q, self.k, self.v = projection[:, 1:-2].split(heads, dim=1)
        if seed % 2:
            self.k, self.v = self.k.contiguous(), _apart(self.v)
        angles = random(shape.num_tokens, (shape.rotary or shape.head_dim) // 2)
        self.cos, self.sin = (x.to(shape.angles) for x in (angles.cos(), angles.sin()))
        num_blocks = 2 + shape.num_tokens // shape.block_size
        self.cache_shape = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        free = torch.randperm(num_blocks * shape.block_size, generator=generator)
        padding = torch.rand(shape.num_tokens, generator=generator) < 0.2
        self.slots = free[: shape.num_tokens].masked_fill(padding, -1)
        weights = [random(shape.head_dim, dtype=shape.dtype) for _ in range(2)]
        self.q_norm = weights[0] if shape.q_norm else None
        self.k_norm = weights[1] if shape.k_norm else None
        self.cache = shape.cache

    def empty_cache(self) -> KvLayer:
        """Poisoned, with blocks further apart than they are long."""
        num_blocks, *block = self.cache_shape
        both = torch.full((num_blocks, 2, *block), 103, dtype=torch.int8).to(self.cache)
        if self.cache in FLOAT_TYPES:
            return KvLayer(*both.fill_(torch.nan).unbind(1))
        scales = torch.full((2, *self.cache_shape[:3]), torch.nan)
        return KvLayer(*both.unbind(1), *scales)

    def run(self, implementation: object) -> tuple[torch.Tensor, KvLayer]:
        kv = self.empty_cache()
        out = implementation.rope_kv_write(  # type: ignore[attr-defined]
            self.q, self.k, self.v, self.cos, self.sin, self.slots, kv,
            self.q_norm, self.k_norm, EPS,
        )  # fmt: skip
        return out, kv


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with NaN around each row and each token."""
    num_tokens, heads, head_dim = x.shape
    wider = torch.full((num_tokens, heads + 2, head_dim + 6), torch.nan, dtype=x.dtype)
    wider[:, 1:-1, :head_dim] = x
    return wider[:, 1:-1, :head_dim]


def ordinals(cache: torch.Tensor) -> torch.Tensor:
    """Values of a quantised type as consecutive whole numbers."""
    if cache.dtype is torch.int8:
        return cache.to(torch.int32)
    bits = cache.view(torch.uint8).to(torch.int32)
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_same_caches(kv: KvLayer, expected: KvLayer, bounds: dict[torch.dtype, float]) -> None:
    """Float types: NaN in the same places, and close. Quantised types: scales to float32's
    precision, values at most one step apart and hardly any at all: one where the order of float32
    operations moves a value across a rounding boundary.
    """
    for one, other in ((kv.k, expected.k), (kv.v, expected.v)):
        if one.dtype in QUANTISED_TYPES:
            steps = (ordinals(one) - ordinals(other)).abs()
            assert steps.max() <= 1
            assert (steps > 0).float().mean() <= 0.01
            continue
        assert torch.equal(one.isnan(), other.isnan())
        assert_close(one.nan_to_num(), other.nan_to_num(), bounds)
    for one, other in ((kv.k_scale, expected.k_scale), (kv.v_scale, expected.v_scale)):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    head_dim = draw(st.sampled_from([2, 6, 64, 80, 96, 128, 192, 256]))
    rotary = draw(st.none() | st.integers(1, head_dim // 2).map(lambda pairs: 2 * pairs))
    dtype = draw(st.sampled_from(FLOAT_TYPES))
    return Shape(
        num_tokens=draw(st.integers(1, 6)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_dim=head_dim,
        rotary=rotary,
        block_size=draw(st.sampled_from([1, 3, 16])),
        dtype=dtype,
        cache=draw(st.sampled_from([dtype, *QUANTISED_TYPES, torch.bfloat16])),
        angles=draw(st.sampled_from([dtype, torch.float32])),
        q_norm=draw(st.booleans()),
        k_norm=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1))
def test_equals_the_reference(shape: Shape, seed: int) -> None:
    inputs = Inputs(shape, seed)
    out, kv = inputs.run(wrapper)
    expected, expected_kv = inputs.run(reference)
    assert out.is_contiguous()
    assert_close(out, expected, BOUNDS)
    assert_same_caches(kv, expected_kv, BOUNDS | {shape.cache: BOUNDS[shape.dtype] + 2**-7})


@pytest.mark.parametrize("cache", [*FLOAT_TYPES, *QUANTISED_TYPES])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_size_and_type_of_cache(head_dim: int, cache: torch.dtype, seeded: int) -> None:
    shape = Shape(head_dim=head_dim, cache=cache, dtype=torch.bfloat16, angles=torch.bfloat16)
    inputs = Inputs(shape, seeded)
    (out, kv), (expected, expected_kv) = inputs.run(wrapper), inputs.run(reference)
    assert_close(out, expected, BOUNDS)
    # float32 sums of two products in the same order: the interpreter has the reference's bits.
    assert_same_caches(kv, expected_kv, dict.fromkeys(FLOAT_TYPES, 0.0))


def test_a_rotation_keeps_lengths_and_turns_by_the_angle() -> None:
    """Against complex numbers, for both implementations."""
    inputs = Inputs(Shape(head_dim=64, rotary=48), 5)
    turn = torch.complex(inputs.cos, inputs.sin)[:, None]
    q = torch.complex(inputs.q[..., :24], inputs.q[..., 24:48])
    for implementation in (wrapper, reference):
        out, _ = inputs.run(implementation)
        turned = torch.complex(out[..., :24], out[..., 24:48])
        torch.testing.assert_close(turned, q * turn)
        assert torch.equal(out[..., 48:], inputs.q[..., 48:])


def test_the_reference_is_rounded_once(seeded: int) -> None:
    """In float32, to the type of x; float64 models are rotated in float64."""
    random = random_tensors(seeded)
    x, angles = random(5, 3, 64, dtype=torch.float64), random(5, 32, dtype=torch.float64)
    turn = torch.complex(angles.cos(), angles.sin())
    exact = torch.complex(x[..., :32], x[..., 32:]) * turn[:, None]
    exact = torch.cat((exact.real, exact.imag), dim=-1)
    out = reference.rotated(x, turn.real, turn.imag)
    torch.testing.assert_close(out, exact, rtol=1e-14, atol=1e-14)
    coarse = [part.to(torch.bfloat16) for part in (x, turn.real, turn.imag)]
    out = reference.rotated(*coarse)
    exact = reference.rotated(*(part.double() for part in coarse)).to(torch.bfloat16)
    assert (out != exact).float().mean() < 0.01


@pytest.mark.parametrize("cache", QUANTISED_TYPES)
def test_what_is_read_back_is_within_half_a_step(cache: torch.dtype, seeded: int) -> None:
    """int8: half of 1 / 127 of a head's largest magnitude. FP8: 2^-4 of the value, or of the least
    normal value below that.
    """
    inputs = Inputs(Shape(head_dim=128, cache=cache), seeded)
    _, kv = inputs.run(wrapper)
    kept = inputs.slots >= 0
    where = inputs.slots[kept] // kv.block_size, inputs.slots[kept] % kv.block_size
    assert kv.v_scale is not None
    scale = kv.v_scale[where]
    read, written = dequantised(kv.v[where], scale), inputs.v[kept]
    assert torch.equal(scale, written.abs().amax(-1) / (127 if cache is torch.int8 else 448))
    if cache is torch.int8:
        bound = 0.5001 * scale[..., None].expand_as(written)
    else:
        bound = 1.0001 * torch.maximum(2**-4 * written.abs(), 2**-10 * scale[..., None])
    assert ((read - written).abs() <= bound).all()


@pytest.mark.parametrize("cache", QUANTISED_TYPES)
def test_zeros_tiny_and_nan_heads(cache: torch.dtype) -> None:
    """Zeros and what is too small for a scale: zeros with scale 0. NaN: its head's scale is NaN."""
    inputs = Inputs(Shape(num_tokens=3, cache=cache), 11)
    inputs.slots = torch.tensor([5, 0, 2])
    inputs.v[0], inputs.v[1], inputs.v[2, :, 7] = 0.0, 1e-37, torch.nan
    for implementation in (wrapper, reference):
        _, kv = inputs.run(implementation)
        assert kv.v_scale is not None
        scales = kv.v_scale.flatten(0, 1)
        assert not scales[5].any()
        assert not scales[0].any()
        assert scales[2].isnan().all()
        elements = kv.v.float().flatten(0, 1)
        assert not elements[[5, 0]].any()


def test_slots_past_the_cache_are_not_written() -> None:
    inputs = Inputs(Shape(num_tokens=3, block_size=4), 1)
    num_slots = inputs.cache_shape[0] * 4
    inputs.slots = torch.tensor([num_slots, 1, 2**40])
    _, kv = inputs.run(wrapper)
    written = ~kv.k.isnan().flatten(0, 1)
    assert written[1].all()
    assert not written[[0, *range(2, num_slots)]].any()


@pytest.mark.parametrize("norm", [False, True])
def test_a_token_is_the_same_bit_for_bit_in_every_batch(norm: bool, seeded: int) -> None:
    shape = Shape(num_tokens=6, dtype=torch.bfloat16, q_norm=norm, k_norm=norm, head_dim=80)
    inputs = Inputs(shape, seeded)
    inputs.slots = torch.arange(6)
    out, kv = inputs.run(wrapper)
    for name in ("q", "k", "v", "cos", "sin", "slots"):
        setattr(inputs, name, getattr(inputs, name)[3:5])
    part, part_kv = inputs.run(wrapper)
    assert torch.equal(part, out[3:5])
    for one, other in ((part_kv.k, kv.k), (part_kv.v, kv.v)):
        assert torch.equal(one.flatten(0, 1)[3:5], other.flatten(0, 1)[3:5])


def test_no_tokens() -> None:
    inputs = Inputs(Shape(num_tokens=0), 1)
    out, kv = inputs.run(wrapper)
    assert out.shape == (0, 4, 64)
    assert kv.k.isnan().all()


ONES = torch.ones(64)
BAD = {
    "q": {"q": torch.ones(5, 4, 64, dtype=torch.float64)},
    "k": {"k": torch.ones(5, 3, 64)},
    "v": {"v": torch.ones(5, 2, 128)[..., ::2]},
    "v of another type": {"v": torch.ones(5, 2, 64).half()},
    "cos": {"cos": torch.ones(5, 33)},
    "sin": {"sin": torch.ones(5, 32).half()},
    "slots": {"slots": torch.arange(5, dtype=torch.int32)},
    "slots of other tokens": {"slots": torch.arange(4)},
    "q_norm": {"q_norm": torch.ones(32)},
    "k_norm": {"k_norm": ONES.half()},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    inputs = Inputs(Shape(), 1)
    for name, tensor in BAD[case].items():
        setattr(inputs, name, tensor)
    with pytest.raises(ValueError, match=rf"^{case.split()[0]}:"):
        inputs.run(wrapper)


def test_an_odd_head_has_no_pairs() -> None:
    inputs = Inputs(Shape(head_dim=64), 1)
    inputs.q, inputs.k, inputs.v = (x[..., :63] for x in (inputs.q, inputs.k, inputs.v))
    inputs.cache_shape = (*inputs.cache_shape[:3], 63)
    with pytest.raises(ValueError, match="pairs"):
        inputs.run(wrapper)
