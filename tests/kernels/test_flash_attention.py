"""flash_attention in Triton's interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors
from paged_prompts import SMALL, Prompts

from kvferry.kernels.chips import CHIPS, INTERPRETER
from kvferry.kernels.flash_attention import reference, wrapper
from kvferry.kernels.flash_attention.configs import Config, candidates, config_for, shared_nbytes
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.kv_layer import HEAD_DIMS, KvLayer
from kvferry.kernels.launch import chip_of

# One rounding of the weights, one of the output, and where the cache is float32 one of k and v;
# averaging v makes outputs smaller than what was rounded, hence not 2^-9 and 2^-12. In float32 the
# order of sums and exp2 for exp.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
A100 = CHIPS["A100"]
"""FP8 by integer operations, addresses by pointers."""
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
]
LENGTHS = st.tuples(st.integers(1, 18), st.sampled_from([0, 0, 1, 15, 16, 17, 33]))


def check(prompts: Prompts) -> None:
    inputs = prompts.inputs()
    assert_close(prompts.attend(inputs), prompts.expected(inputs), BOUNDS)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(LENGTHS, min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (1, 5), (1, 8)]),
    head_dim=st.sampled_from(HEAD_DIMS),
    block_size=st.sampled_from([8, 16, 24, 32, 48, 256]),
    types=st.sampled_from(TYPES),
    window=st.none() | st.integers(1, 45),
    softcap=st.none() | st.just(2.0),
    chip=st.sampled_from([INTERPRETER, A100]),
    config=st.sampled_from([SMALL, Config(rows=32, keys=16, buffers=2)]),
)
def test_equals_the_reference(
    seed: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    types: tuple[torch.dtype, torch.dtype],
    window: int | None,
    softcap: float | None,
    chip: object,
    config: Config,
) -> None:
    check(
        Prompts(
            lengths=tuple(lengths),
            num_kv_heads=heads[0],
            group=heads[1],
            head_dim=head_dim,
            block_size=block_size,
            dtype=types[0],
            cache_dtype=types[1],
            window=window,
            softcap=softcap,
            chip=chip,
            config=config,
            seed=seed,
        )
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [8, 32])
def test_head_dims(head_dim: int, block_size: int, seeded: int) -> None:
    """By pointers and by descriptors, with a full tile, one at the diagonal and a tail."""
    check(
        Prompts(
            lengths=((18, 17),),
            head_dim=head_dim,
            block_size=block_size,
            dtype=torch.bfloat16,
            cache_dtype=torch.bfloat16,
            seed=seeded,
        )
    )


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize("chip", [INTERPRETER, A100], ids=lambda chip: chip.name)
def test_types(dtype: torch.dtype, cache_dtype: torch.dtype, chip: object, seeded: int) -> None:
    check(
        Prompts(
            lengths=((3, 40),),
            head_dim=80,
            block_size=48,
            dtype=dtype,
            cache_dtype=cache_dtype,
            chip=chip,
            seed=seeded,
        )
    )


@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (2, 3), (1, 8)])
def test_groups_of_query_heads(num_kv_heads: int, group: int, seeded: int) -> None:
    """With scales, which have heads of their own, and capped scores."""
    check(
        Prompts(
            lengths=((2, 17),),
            num_kv_heads=num_kv_heads,
            group=group,
            cache_dtype=torch.int8,
            softcap=2.0,
            seed=seeded,
        )
    )


@pytest.mark.parametrize("window", [1, 15, 16, 17, 48])
def test_windows_at_tile_edges(window: int, seeded: int) -> None:
    check(Prompts(lengths=((17, 31), (1, 47)), block_size=16, window=window, seed=seeded))


def test_descriptors_are_used_where_a_tile_lies_in_one_block() -> None:
    kv = Prompts(lengths=((1, 0),), block_size=48).inputs().kv
    assert SMALL.uses_tma(INTERPRETER, kv)
    assert not SMALL.uses_tma(A100, kv)
    assert not replace(SMALL, keys=32).uses_tma(INTERPRETER, kv)


def test_every_other_layer_of_a_wider_cache_and_a_slice_of_qkv() -> None:
    prompts = Prompts(lengths=((18, 3),), num_kv_heads=2)
    inputs = prompts.inputs()
    wide = torch.full((*inputs.kv.k.shape[:1], 2, *inputs.kv.k.shape[1:]), torch.nan)
    wide[:, 0], k = inputs.kv.k, wide[:, 0]
    wide_v = torch.full_like(wide, torch.nan)
    wide_v[:, 0], v = inputs.kv.v, wide_v[:, 0]
    qkv = torch.full((18, 6, 64), torch.nan)
    qkv[:, 2:4] = inputs.q
    strided = replace(inputs, kv=KvLayer(k, v), q=qkv[:, 2:4])
    assert torch.equal(prompts.attend(strided), prompts.attend(inputs))


def test_the_public_function_in_the_tuned_configuration() -> None:
    prompts = Prompts(lengths=((20, 30), (1, 3)), config=config())
    inputs = prompts.inputs()
    arguments = (inputs.q, inputs.kv, inputs.tables, inputs.starts, inputs.contexts, inputs.plan)
    out = torch.empty_like(inputs.q)
    result = wrapper.flash_attention(*arguments, scale=0.1, out=out)
    assert result is out
    clean = KvLayer(inputs.kv.k.nan_to_num(), inputs.kv.v.nan_to_num())
    expected = reference.flash_attention(inputs.q, clean, *arguments[2:], scale=0.1)
    assert_close(out, expected, BOUNDS)
    assert torch.equal(wrapper.flash_attention(*arguments, scale=0.1), out)


def config() -> Config:
    kv = Prompts(lengths=((1, 0),)).inputs().kv
    return config_for(chip_of(kv.k.device), kv, torch.float32)


def test_no_tokens() -> None:
    inputs = Prompts(lengths=((1, 3),)).inputs()
    empty = replace(
        inputs,
        q=inputs.q[:0],
        starts=torch.zeros(2, dtype=torch.int32),
        plan=PrefillPlan.of([0], [3]),
    )
    assert Prompts(lengths=((0, 3),)).attend(empty).shape == (0, 1, 64)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_tiles_fit_in_shared_memory(chip: object, head_dim: int, dtype: torch.dtype) -> None:
    k = torch.empty(4, 128, 2, head_dim, dtype=dtype, device="meta")
    kv = KvLayer(k, k)
    assert shared_nbytes(config_for(chip, kv, torch.bfloat16), kv, torch.bfloat16) <= (
        chip.shared_limit
    )
    tried = list(candidates(chip, kv, torch.bfloat16))
    assert len(tried) == len(set(tried)) >= 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.ones(5, 1, 32)}, "q"),
        ({"q": torch.ones(5, 1, 128)[..., ::2]}, "q"),
        ({"q": torch.ones(5, 1, 64, dtype=torch.float64)}, "q"),
        ({"tables": torch.ones(2, 2, dtype=torch.int32)}, "block_tables"),
        ({"tables": torch.ones(1, 2)}, "block_tables"),
        ({"starts": torch.ones(3, dtype=torch.int32)}, "query_starts"),
        ({"contexts": torch.ones(1, dtype=torch.int64)}, "context_lens"),
    ],
)
def test_bad_tensors_are_named(change: dict[str, torch.Tensor], named: str) -> None:
    prompts = Prompts(lengths=((5, 3),))
    with pytest.raises(ValueError, match=named):
        prompts.attend(replace(prompts.inputs(), **change))


def test_bad_options_are_named() -> None:
    inputs = Prompts(lengths=((5, 3),)).inputs()
    arguments = (inputs.q, inputs.kv, inputs.tables, inputs.starts, inputs.contexts)
    plan = PrefillPlan.of([5], [3])
    for options in ({"scale": 0.0}, {"window": 0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            wrapper.flash_attention(*arguments, plan, **{"scale": 1.0, **options})
    with pytest.raises(ValueError, match="plan"):
        wrapper.flash_attention(*arguments, inputs.plan, scale=1.0)
    with pytest.raises(ValueError, match="out"):
        wrapper.flash_attention(*arguments, plan, scale=1.0, out=random_tensors(0)(5, 2, 64))
