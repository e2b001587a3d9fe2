"""Kernels on a CUDA device: right as they are compiled there, and right when replayed by a graph.

The inputs are those of `kvferry bench kernels`, the references plain torch on the same device.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kvferry.bench.kernel_cases.case import Case
from kvferry.bench.kernel_cases.registry import chosen_cases
from kvferry.bench.kernel_device import check, relative_error
from kvferry.kernels.flash_decoding import reference as decoding_reference
from kvferry.kernels.flash_decoding import wrapper as decoding
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.launch import Launch, chip_of
from kvferry.kernels.quant_matmul import reference as quant_reference
from kvferry.kernels.quant_matmul.wrapper import quant_matmul
from kvferry.kernels.rms_norm import reference as norm_reference
from kvferry.kernels.rms_norm import wrapper as norm
from kvferry.kernels.sampling import reference as sampling_reference
from kvferry.kernels.sampling import wrapper as sampling
from kvferry.kernels.sampling.tensors import SamplingTensors

pytestmark = pytest.mark.gpu

# bf16: one rounding of weights and output, and another order of sums.
TOLERANCE = 2**-7
BLOCK_SIZE = 16


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("case", chosen_cases(ci_only=True), ids=lambda c: f"{c.kernel}: {c.name}")
def test_a_compiled_kernel_agrees_with_its_reference(case: Case) -> None:
    assert check(case.make(cuda(), chip_of(cuda()))) <= case.tolerance


def captured(launches: list[Launch]) -> torch.cuda.CUDAGraph:
    """A graph of launches that ran once before, so that nothing is compiled while capturing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch.run()
    return graph


def test_a_graph_of_decoding_follows_the_lengths() -> None:
    """One capture, then steps of other lengths: one token, full blocks, padding, nothing cached."""
    device, num_seqs, max_len, heads, kv_heads, dim = cuda(), 8, 2048, 16, 4, 128
    per_seq = max_len // BLOCK_SIZE
    size = (num_seqs * per_seq, BLOCK_SIZE, kv_heads, dim)
    k, v = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    kv = KvLayer(k, v)
    tables = torch.randperm(size[0], device=device).to(torch.int32).view(num_seqs, per_seq)
    context_lens = torch.full((num_seqs,), 100, device=device, dtype=torch.int32)
    query_starts = torch.arange(num_seqs + 1, device=device, dtype=torch.int32)
    q = torch.randn(num_seqs, heads, dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    splits = SplitPlan.for_bucket(num_seqs, 1, heads, kv, max_len, chip_of(device))
    args = (q, kv, tables, context_lens, query_starts, splits)
    graph = captured(
        [
            decoding.plan_splits_launch(context_lens, query_starts, splits),
            *decoding.flash_decoding_launches(*args, chip_of(device), out, scale=dim**-0.5),
        ]
    )
    for lengths in (
        [0] * 8,
        [1, 15, 16, 17, 2047, 500, 31, 32],
        [2047] * 8,
        [0, 0, 0, 2000, 0, 0, 0, 0],
    ):
        context_lens.copy_(torch.tensor(lengths))
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        expected = decoding_reference.flash_decoding(*args, scale=dim**-0.5)
        assert relative_error(out, expected) <= TOLERANCE, lengths


def test_a_graph_of_the_norm_reads_its_inputs_anew() -> None:
    device = cuda()
    x, residual = (torch.randn(33, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(4096, device=device, dtype=torch.bfloat16)
    out, total = torch.empty_like(x), torch.empty_like(x)
    launch = norm.rms_norm_launch(x, residual, weight, 1e-5, out, total, chip_of(device))
    graph = captured([launch])
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        expected, sums = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
        assert relative_error(out, expected) <= TOLERANCE
        assert relative_error(total, sums) <= TOLERANCE


def sampling_rows(rows: int, device: torch.device) -> SamplingTensors:
    """Every third row greedy, every third with top-k, every third with top-p and min-p."""
    kind = torch.arange(rows, device=device) % 3
    return SamplingTensors(
        temperature=torch.where(kind == 0, 0.0, 0.8),
        top_k=torch.where(kind == 1, 50, 0).int(),
        top_p=torch.where(kind == 2, 0.9, 1.0),
        min_p=torch.where(kind == 2, 0.01, 0.0),
        seed=torch.arange(rows, device=device) * 2**61,
        sample_index=torch.zeros(rows, device=device, dtype=torch.int32),
        position=torch.arange(rows, device=device),
    )


def row_of(params: SamplingTensors, row: int) -> SamplingTensors:
    parts = {
        field.name: getattr(params, field.name)[row : row + 1].clone()
        for field in fields(params)
        if field.name != "filtered"
    }
    return SamplingTensors(**parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    """A chip's max passes over NaN where the interpreter's keeps it. Rows at an odd stride."""
    device, vocab_size = cuda(), 50001
    logits = (torch.randn(13, vocab_size + 2, device=device) * 2.5).to(dtype)
    logits[:, vocab_size:] = torch.nan
    params = sampling_rows(len(logits), device)
    for row, value in ((1, torch.nan), (3, torch.inf), (5, -torch.inf), (6, torch.nan)):
        logits[row, 777 * row] = value
    logits[8] = torch.nan
    logits[10] = -torch.inf
    got = sampling.sample(logits, params, vocab_size)
    expected = sampling_reference.sample(logits, params, vocab_size)
    assert got.invalid.nonzero().flatten().tolist() == [1, 3, 5, 6, 8, 10]
    assert torch.equal(got.invalid, expected.invalid)
    assert torch.equal(got.token_ids, expected.token_ids)
    for row in range(len(logits)):
        alone = sampling.sample(logits[row : row + 1], row_of(params, row), vocab_size)
        assert torch.equal(alone.token_ids, got.token_ids[row : row + 1])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_rows_are_the_same_in_any_batch(bits: int) -> None:
    device = cuda()
    weight = quant_reference.quantise(torch.randn(1000, 1024, device=device), bits, 128)
    x = torch.randn(600, 1024, device=device, dtype=torch.bfloat16)
    out = quant_matmul(x, weight, batch_invariant=True)
    assert relative_error(out, quant_reference.quant_matmul(x, weight)) <= TOLERANCE
    for m in (1, 7, 16, 64, 65, 257):
        assert torch.equal(quant_matmul(x[:m], weight, batch_invariant=True), out[:m])
        assert torch.equal(quant_matmul(x[-m:], weight, batch_invariant=True), out[-m:])
