"""Graphs of decode and verification steps: what a bucket holds, and that it changes no number.

On the reference ops, whose results for a row do not depend on what is computed beside it, and in
Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from fake_capture import FakeCapture
from hypothesis import given
from hypothesis import strategies as st
from step_plans import scattered_tables, step_plan

from kvferry.bench.engine_check import Setting, on_backend, random_decoder
from kvferry.cache.paged import PagedKV
from kvferry.engine.graphs import (
    Bucket,
    DecodeGraphs,
    StaticInputs,
    buckets_for,
    log_progress,
)
from kvferry.engine.kernel_attention import KernelAttention
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import ModelRunner
from kvferry.engine.step_tensors import StepArrays
from kvferry.kernels.ops import Backend, ops_for
from kvferry.models.decoder import Decoder
from kvferry.models.spec import parse_spec

torch.set_num_threads(1)

BLOCK_SIZE, MAX_LEN, VOCAB_SIZE = 8, 128, 96
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@cache
def decoder_of(backend: Backend) -> Decoder:
    setting = Setting(
        backend=backend, device=torch.device("cpu"), dtype=torch.float32, kv_dtype=torch.float32
    )
    return on_backend(random_decoder(parse_spec(CONFIG), 0), setting)


class ReferenceRunner(ModelRunner):
    """The kernels' engine on their references."""

    def __init__(self, decoder: Decoder, kv: PagedKV) -> None:
        super().__init__(decoder, kv, VOCAB_SIZE)
        spec = decoder.spec
        ops = ops_for(Backend.TORCH)
        self._attention = KernelAttention(kv, ops, spec.num_heads, MAX_LEN, torch.float32)


def paged(num_blocks: int = 200) -> PagedKV:
    kv = PagedKV.allocate(
        num_layers=2,
        num_kv_heads=1,
        head_dim=64,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        dtype=torch.float32,
    )
    kv.tensor.copy_(torch.randn(kv.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def plan_of(query_lens: Sequence[int], context_lens: Sequence[int], seed: int = 0) -> StepPlan:
    rng = np.random.default_rng(seed)
    lengths = np.add(query_lens, context_lens).tolist()
    tables, _ = scattered_tables(lengths, BLOCK_SIZE, rng)
    queries = [rng.integers(VOCAB_SIZE, size=length).tolist() for length in query_lens]
    return step_plan(queries, list(context_lens), tables)


def captured(max_seqs: int, max_query_len: int = 1) -> tuple[ModelRunner, PagedKV, FakeCapture]:
    kv, capture = paged(), FakeCapture()
    runner = ReferenceRunner(decoder_of(Backend.TORCH), kv)
    runner.capture_graphs(capture, lambda done, total: None, max_seqs, max_query_len)
    return runner, kv, capture


@given(st.integers(1, 300), st.integers(1, 16))
def test_every_step_that_a_pool_allows_has_one_bucket(max_seqs: int, max_query_len: int) -> None:
    buckets = buckets_for(max_seqs, max_query_len)
    assert len(set(buckets)) == len(buckets)
    assert [b.num_tokens for b in buckets] == sorted((b.num_tokens for b in buckets), reverse=True)
    for num_seqs in {1, max_seqs, max_seqs // 2 or 1, max_seqs * 2 // 3 or 1}:
        for longest in {1, max_query_len, (max_query_len + 1) // 2}:
            fitting = [b for b in buckets if b.num_seqs >= num_seqs and b.query_len >= longest]
            smallest = min(fitting, key=lambda b: (b.num_seqs, b.query_len))
            assert smallest.num_seqs < 2 * num_seqs
            assert smallest.query_len < 2 * longest


LENS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60)), min_size=1, max_size=11)


@pytest.fixture(scope="module")
def shared() -> tuple[ModelRunner, PagedKV, FakeCapture]:
    return captured(max_seqs=8, max_query_len=4)


@given(steps=st.lists(LENS, min_size=1, max_size=3))
def test_logits_and_kv_are_those_of_an_eager_step(
    steps: list[list[tuple[int, int]]], shared: tuple[ModelRunner, PagedKV, FakeCapture]
) -> None:
    """Step after step in the same static tensors, which hold what the step before left there."""
    runner, kv, capture = shared
    kv.tensor.copy_(paged().tensor)
    eager_kv = paged()
    eager = ReferenceRunner(decoder_of(Backend.TORCH), eager_kv)
    for number, lens in enumerate(steps):
        plan = plan_of([q for q, _ in lens], [c for _, c in lens], number)
        before = sum(capture.replays)
        with torch.inference_mode():
            logits, expected = runner.logits(plan).clone(), eager.logits(plan)
        assert sum(capture.replays) - before == (len(lens) <= 8)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(kv.tensor, eager_kv.tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_seqs", [8, 2])
@pytest.mark.parametrize("other", [None, [1, 1, 1], [1, 20]])
def test_a_step_that_was_prepared_is_the_same(max_seqs: int, other: list[int] | None) -> None:
    """With tokens that come last, as a graph and as it comes, with another step between or not."""
    runner, _, capture = captured(max_seqs)
    eager = ReferenceRunner(decoder_of(Backend.TORCH), paged())
    plan = plan_of([1] * 5, [0, 9, 30, 7, 8])
    token_ids = plan.token_ids.copy()
    with torch.inference_mode():
        plan.token_ids[:] = 0
        runner.prepare(plan)
        if other is not None:
            between = plan_of(other, [3] * len(other), seed=3)
            logits = runner.logits(between).clone()
            torch.testing.assert_close(logits, eager.logits(between), rtol=0, atol=1e-5)
        plan.token_ids[:] = token_ids
        logits, expected = runner.logits(plan).clone(), eager.logits(plan)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert sum(capture.replays) == (max_seqs == 8) * (1 + (other == [1, 1, 1]))


def test_of_a_prepared_step_only_token_ids_are_left_to_fill_in() -> None:
    """What is done to its other numbers afterwards comes too late, until it is launched anew."""
    runner, _, _ = captured(max_seqs=8)
    eager = ReferenceRunner(decoder_of(Backend.TORCH), paged())
    plan, same = (plan_of([1] * 5, [8, 9, 30, 7, 8]) for _ in range(2))
    with torch.inference_mode():
        runner.prepare(plan)
        plan.context_lens[:] = 0
        plan.token_ids[0] = same.token_ids[0] = 1
        logits, expected = runner.logits(plan).clone(), eager.logits(same)
        again = runner.logits(plan)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(again, expected, rtol=0, atol=1e-2)


def test_padding_rows_change_nothing() -> None:
    """Bit for bit, whatever they hold: tokens, positions and tables that some step left there."""
    found = []
    for earlier in (None, [(1, 120)] * 8, [(1, 3)] * 7):
        runner, kv, _ = captured(max_seqs=8)
        with torch.inference_mode():
            if earlier is not None:
                runner.logits(plan_of([q for q, _ in earlier], [c for _, c in earlier], 5))
            kv.tensor.copy_(paged().tensor)
            found.append((runner.logits(plan_of([1] * 5, [0, 9, 30, 7, 8])).clone(), kv.tensor))
    for logits, cache_after in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(cache_after, found[0][1])


def test_nothing_is_written_by_a_capture() -> None:
    _, kv, capture = captured(max_seqs=4, max_query_len=2)
    assert len(capture.graphs) == 6
    assert torch.equal(kv.tensor, paged().tensor)


@pytest.mark.parametrize(
    ("query_lens", "graph"),
    [
        ([1], (1, 1)),
        ([1, 1, 1], (4, 1)),
        ([1] * 4, (4, 1)),
        ([2, 1], (2, 2)),
        ([1] * 5, None),
        ([3], None),
        ([1, 20], None),
        ([40], None),
    ],
)
def test_what_no_graph_holds_runs_as_it_comes(
    query_lens: list[int], graph: tuple[int, int] | None
) -> None:
    runner, _, capture = captured(max_seqs=4, max_query_len=2)
    with torch.inference_mode():
        runner.logits(plan_of(query_lens, [5] * len(query_lens)))
    order = buckets_for(4, 2)
    replayed = [order[i] for i, count in enumerate(capture.replays) if count]
    assert replayed == ([Bucket(*graph)] if graph else [])


def test_several_samples_of_a_row_run_as_they_come() -> None:
    runner, _, capture = captured(max_seqs=4)
    plan = plan_of([1, 1], [5, 9])
    plan.sampled = np.array([0, 1, 1, 1], np.int32)
    plan.sampling = SamplingRows.greedy(4)
    with torch.inference_mode():
        logits = runner.logits(plan)
    assert sum(capture.replays) == 0
    assert torch.equal(logits[1], logits[3])


def test_whoever_listens_to_layers_gets_an_eager_step() -> None:
    runner, _, capture = captured(max_seqs=4)
    heard = []
    with torch.inference_mode():
        runner.logits(plan_of([1], [5]), lambda layers, event: heard.append(layers))
    assert heard == [0, 1, 2]
    assert sum(capture.replays) == 0


def test_block_tables_grow_up_to_the_context_limit() -> None:
    """Blocks are added to the tables of running sequences, one graph all the while."""
    runner, _, capture = captured(max_seqs=2)
    eager = ReferenceRunner(decoder_of(Backend.TORCH), paged())
    for context in (0, BLOCK_SIZE - 1, BLOCK_SIZE, 40, MAX_LEN - 1):
        plan = plan_of([1, 1], [context, 3])
        with torch.inference_mode():
            logits, expected = runner.logits(plan).clone(), eager.logits(plan)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert capture.replays == [5, 0]


def test_progress_is_told_graph_by_graph() -> None:
    told: list[tuple[int, int]] = []
    runner = ReferenceRunner(decoder_of(Backend.TORCH), paged())
    runner.capture_graphs(FakeCapture(), lambda done, total: told.append((done, total)), 5, 1)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (3, 3), (9, 4), (40, 4)])
def test_progress_is_a_bar_in_the_log(
    total: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvferry.engine.graphs"):
        for done in range(1, total + 1):
            log_progress(done, total)
    assert len(caplog.messages) == lines
    assert caplog.messages[-1] == f"CUDA graphs [{'#' * 20}] {total} of {total}"


def test_without_a_capture_every_step_is_eager() -> None:
    def never(inputs: StaticInputs, query_len: int) -> torch.Tensor:
        raise AssertionError("nothing was captured")

    graphs = DecodeGraphs(never, buckets_for(4), 16, torch.device("cpu"))
    assert graphs.logits(StepArrays.of(plan_of([1], [5]), BLOCK_SIZE)) is None


@pytest.mark.slow
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 1, 2]])
def test_kernels_give_the_same_bits(query_lens: list[int]) -> None:
    """In the interpreter, with products that do not depend on the batch."""
    decoder = decoder_of(Backend.TRITON_BATCH_INVARIANT)
    plan = plan_of(query_lens, [20, 0, 37])
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for with_graphs in (False, True):
        kv, capture = paged(), FakeCapture()
        runner = ModelRunner(decoder, kv, VOCAB_SIZE)
        if with_graphs:
            runner.capture_graphs(capture, lambda done, total: None, 4, max(query_lens))
        with torch.inference_mode():
            results.append((runner.logits(plan).clone(), kv.tensor))
        assert sum(capture.replays) == with_graphs
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
