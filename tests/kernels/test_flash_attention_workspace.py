"""Keys and values that are converted in a workspace before flash_attention reads them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import assert_close
from paged_prompts import Inputs, Prompts

from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip
from kvferry.kernels.flash_attention import wrapper
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_attention.unpack import unpack_launch
from kvferry.kernels.flash_attention.workspace import BLOCK_TOKENS, StepWorkspace, Workspace
from kvferry.kernels.kv_layer import HEAD_DIMS, dequantised

# One rounding of k and v, of the weights and of the output, as over a float32 cache: averaging v
# makes outputs smaller than what was rounded, hence not 2^-9 and 2^-12. In float32 the order of
# sums and exp2 for exp.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
QUANTISED = [torch.int8, torch.float8_e4m3fn]
CACHES = [*QUANTISED, *BOUNDS]
LENGTHS = st.tuples(st.integers(1, 20), st.sampled_from([0, 1, 15, 108, 127, 128, 150, 270]))
CHIPS_TRIED = [INTERPRETER, CHIPS["A100"]]
"""The A100 converts FP8 by integer operations."""
CHIP = st.sampled_from(CHIPS_TRIED)
WINDOW = st.none() | st.sampled_from([1, 20, 128, 140])
CACHED = Prompts(
    lengths=((5, 0), (37, 129), (18, 30)),
    num_kv_heads=2,
    group=2,
    block_size=48,
    dtype=torch.bfloat16,
    cache_dtype=torch.float8_e4m3fn,
    seed=3,
)


def workspace_for(prompts: Prompts, inputs: Inputs, spare_blocks: int = 1) -> StepWorkspace:
    """Of exactly these lengths, in elements that are NaN."""
    query_lens, context_lens = inputs.starts.diff().numpy(), inputs.contexts.numpy()
    used = sum(-(-(q + c) // BLOCK_TOKENS) for q, c in zip(query_lens, context_lens, strict=True))
    workspace = Workspace.allocate(
        (used + spare_blocks) * BLOCK_TOKENS,
        num_kv_heads=prompts.num_kv_heads,
        head_dim=prompts.head_dim,
        dtype=prompts.dtype,
    )
    assert workspace.elements.isnan().all()
    return workspace.for_step(query_lens, context_lens, window=prompts.window)


def attend_unpacked(prompts: Prompts, inputs: Inputs) -> torch.Tensor:
    """The kernel's answer over keys and values that were unpacked before."""
    workspace = workspace_for(prompts, inputs)
    unpack_launch(inputs.kv, inputs.tables, workspace, prompts.chip).run()
    return prompts.attend(replace(inputs, kv=workspace.layer, tables=workspace.tables))


def check_elements(prompts: Prompts) -> None:
    """The products of elements and scales, rounded once, bit for bit: in the places that the tables
    say, and nowhere else.
    """
    inputs = prompts.inputs()
    workspace = workspace_for(prompts, inputs)
    unpack_launch(inputs.kv, inputs.tables, workspace, prompts.chip).run()
    stored = (inputs.kv.k, inputs.kv.k_scale), (inputs.kv.v, inputs.kv.v_scale)
    caches = [dequantised(x, scale).to(prompts.dtype) for x, scale in stored]
    expected = torch.full_like(workspace.elements, torch.nan)
    for seq, (queries, context) in enumerate(prompts.lengths):
        first = 0 if prompts.window is None else max(0, context - prompts.window + 1)
        tokens = torch.arange(first // BLOCK_TOKENS * BLOCK_TOKENS, queries + context)
        source = inputs.tables[seq, tokens // prompts.block_size].long()
        target = workspace.tables[seq, tokens // BLOCK_TOKENS].long()
        for i, cache in enumerate(caches):
            expected[i, target, tokens % BLOCK_TOKENS] = cache[source, tokens % prompts.block_size]
    assert torch.equal(workspace.elements.nan_to_num(7.0), expected.nan_to_num(7.0))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from(HEAD_DIMS),
    block_size=st.sampled_from([8, 24, 128, 256]),
    dtype=st.sampled_from(list(BOUNDS)),
    cache_dtype=st.sampled_from(CACHES),
    window=WINDOW,
    chip=CHIP,
)
def test_elements(
    seed: int,
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None,
    chip: Chip,
) -> None:
    check_elements(
        Prompts(
            lengths=tuple(lengths),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            cache_dtype=cache_dtype,
            window=window,
            chip=chip,
            seed=seed,
        )
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("chip", CHIPS_TRIED, ids=lambda chip: chip.name)
def test_types(dtype: torch.dtype, cache_dtype: torch.dtype, chip: Chip, seeded: int) -> None:
    check_elements(
        Prompts(
            lengths=((3, 40),),
            num_kv_heads=2,
            head_dim=80,
            dtype=dtype,
            cache_dtype=cache_dtype,
            chip=chip,
            seed=seeded,
        )
    )


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(LENGTHS, min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    head_dim=st.sampled_from([64, 80]),
    block_size=st.sampled_from([16, 48]),
    dtype=st.sampled_from(list(BOUNDS)),
    cache_dtype=st.sampled_from(QUANTISED),
    window=WINDOW,
    softcap=st.none() | st.just(2.0),
    chip=CHIP,
)
def test_attention_equals_the_reference(
    seed: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    chip: Chip,
) -> None:
    prompts = Prompts(
        lengths=tuple(lengths),
        num_kv_heads=heads[0],
        group=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        window=window,
        softcap=softcap,
        chip=chip,
        seed=seed,
    )
    inputs = prompts.inputs()
    assert_close(attend_unpacked(prompts, inputs), prompts.expected(inputs), BOUNDS)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
def test_the_public_function(cache_dtype: torch.dtype, seeded: int) -> None:
    """It reads the workspace alone, whose tiles are those of a float cache."""
    prompts = replace(CACHED, dtype=torch.float16, cache_dtype=cache_dtype, seed=seeded)
    inputs = prompts.inputs()
    plan = PrefillPlan.of(inputs.starts.diff().numpy(), inputs.contexts.numpy())
    workspace = workspace_for(prompts, inputs)
    step = (inputs.starts, inputs.contexts, plan)
    out = wrapper.flash_attention(
        inputs.q, inputs.kv, inputs.tables, *step, scale=0.125, workspace=workspace
    )
    assert_close(out, prompts.expected(inputs), BOUNDS)
    rounded = (workspace.layer, workspace.tables)
    assert torch.equal(wrapper.flash_attention(inputs.q, *rounded, *step, scale=0.125), out)


def test_rows_do_not_depend_on_neighbours_or_chunks(seeded: int) -> None:
    """Bit for bit, wherever a sequence lies in the workspace."""
    prompts = replace(CACHED, num_kv_heads=1, group=1, seed=seeded)
    inputs = prompts.inputs()
    together = attend_unpacked(prompts, inputs)[5:42]
    for cuts in ((0, 37), (0, 1, 20, 37)):
        parts = []
        for first, last in pairwise(cuts):
            part = replace(
                inputs,
                q=inputs.q[5 + first : 5 + last],
                tables=inputs.tables[1:2],
                starts=torch.tensor([0, last - first], dtype=torch.int32),
                contexts=torch.tensor([129 + first], dtype=torch.int32),
                plan=PrefillPlan.of([last - first], [129 + first], rows=prompts.config.rows),
            )
            parts.append(attend_unpacked(prompts, part))
        assert torch.equal(torch.cat(parts), together), cuts


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 900)), min_size=1, max_size=9),
    room=st.integers(0, 2000),
    window=st.none() | st.integers(1, 500),
)
def test_groups_are_as_large_as_fits(
    lengths: list[tuple[int, int]], room: int, window: int | None
) -> None:
    queries, contexts = np.array(lengths).T
    workspace = Workspace.allocate(room, num_kv_heads=1, head_dim=1, dtype=torch.float16)
    first_keys = 0 if window is None else np.maximum(0, contexts - window + 1)
    blocks = -(-(queries + contexts) // BLOCK_TOKENS) - first_keys // BLOCK_TOKENS

    def fits(seqs: slice) -> bool:
        if blocks[seqs].sum() <= workspace.num_blocks:
            step = workspace.for_step(queries[seqs], contexts[seqs], window=window)
            assert len(step.blocks) == blocks[seqs].sum()
            return True
        with pytest.raises(ValueError, match="workspace: holds"):
            workspace.for_step(queries[seqs], contexts[seqs], window=window)
        return False

    groups = workspace.groups(queries, contexts, window=window)
    assert [s for group in groups for s in range(group.start, group.stop)] == [*range(len(lengths))]
    assert all(group.stop == group.start + 1 or fits(group) for group in groups)
    assert not any(fits(slice(a.start, b.start + 1)) for a, b in pairwise(groups))


def test_sequences_follow_each_other_in_the_workspace() -> None:
    workspace = Workspace.allocate(1000, num_kv_heads=1, head_dim=64, dtype=torch.float16)
    step = workspace.for_step([100, 1, 30], [100, 0, 230])
    assert step.tables.tolist() == [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    assert step.blocks.tolist() == [
        [0, 0, 128], [0, 128, 72], [1, 0, 1], [2, 0, 128], [2, 128, 128], [2, 256, 4]
    ]  # fmt: skip


def test_blocks_before_the_window_are_left_out() -> None:
    workspace = Workspace.allocate(500, num_kv_heads=1, head_dim=64, dtype=torch.float16)
    step = workspace.for_step([30, 100], [370, 100], window=115)
    assert step.tables.tolist() == [[0, 0, 0, 1], [2, 3, 4, 5]]
    assert step.blocks.tolist() == [[0, 256, 128], [0, 384, 16], [1, 0, 128], [1, 128, 72]]


@pytest.mark.parametrize("num_tokens", [1, 128, 129, 4000])
def test_its_size_is_known_before(num_tokens: int) -> None:
    shape = {"num_kv_heads": 3, "head_dim": 80, "dtype": torch.bfloat16}
    workspace = Workspace.allocate(num_tokens, **shape, device="meta")
    assert workspace.elements.nbytes == Workspace.nbytes_for(num_tokens, **shape)
    assert workspace.groups([1], [num_tokens - 1]) == [slice(0, 1)]
    workspace.for_step([1], [num_tokens - 1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_kv_heads": 1}, "workspace"),
        ({"head_dim": 128}, "workspace"),
        ({"dtype": torch.float16}, "workspace"),
        ({"lengths": ((5, 0), (37, 129))}, "workspace"),
    ],
)
def test_a_workspace_of_another_layer_or_step_is_named(
    change: dict[str, object], named: str
) -> None:
    inputs, other = CACHED.inputs(), replace(CACHED, **change)
    arguments = (inputs.q, inputs.kv, inputs.tables, inputs.starts, inputs.contexts)
    plan = PrefillPlan.of([5, 37, 18], [0, 129, 30])
    with pytest.raises(ValueError, match=named):
        wrapper.flash_attention(
            *arguments, plan, scale=1.0, workspace=workspace_for(other, other.inputs())
        )
