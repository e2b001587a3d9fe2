"""Nothing is compiled while a worker serves: kernels of rows have one binary for every batch.

Triton's launcher compiles anew when an integer becomes 1, or a multiple of 16, or stops being one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from meta_tensors import empty, floats, int32, int64

from kvferry.kernels.aot import identity
from kvferry.kernels.chips import CHIPS
from kvferry.kernels.embedding.wrapper import embedding_launch
from kvferry.kernels.gated.activation import Activation
from kvferry.kernels.gated.wrapper import gated_launch
from kvferry.kernels.launch import Launch
from kvferry.kernels.matmul.configs import HALF
from kvferry.kernels.matmul.wrapper import matmul_launch
from kvferry.kernels.quant_matmul.layout import QuantWeight
from kvferry.kernels.quant_matmul.wrapper import quant_matmul_launches
from kvferry.kernels.rms_norm.wrapper import rms_norm_launch
from kvferry.kernels.sampling.edit_launches import add_tokens_launch, top_logprobs_launches
from kvferry.kernels.sampling.launches import sample_launches
from kvferry.kernels.sampling.tensors import SampledTokens, SamplingTensors, TopLogprobs

H100 = CHIPS["H100"]
SIZES = (1, 2, 3, 16, 48, 1000)
SIZE = 4096


def norms() -> Iterator[Launch]:
    for rows in SIZES:
        x = empty(rows, SIZE)
        yield rms_norm_launch(x, x, empty(SIZE), 1e-5, x, x, H100)


def gates() -> Iterator[Launch]:
    for rows in SIZES:
        gate, up = empty(rows, 2 * SIZE).chunk(2, dim=-1)
        yield gated_launch(gate, up, empty(rows, SIZE), Activation.SILU, H100)


def embeddings() -> Iterator[Launch]:
    for rows in SIZES:
        yield embedding_launch(int64(rows), empty(8000, SIZE), 0, empty(rows, SIZE), H100)


def products() -> Iterator[Launch]:
    """Up to the batch at which taller tiles begin."""
    for rows in (size for size in SIZES if size <= HALF[90].rows[0].block_m):
        yield matmul_launch(empty(rows, SIZE), empty(6144, SIZE), None, empty(rows, 6144), H100)


def quantised_products(index: int) -> Iterator[Launch]:
    """The product or the sum of its splits, in one bucket of rows."""
    weight = QuantWeight(
        packed=empty(32, SIZE, 32, dtype=torch.int16),
        scales=empty(32, SIZE, 1),
        zeros=None,
        bits=4,
        group_size=128,
        num_inputs=SIZE,
    )
    for rows in range(1, 9):
        x, out = empty(rows, SIZE), empty(rows, SIZE)
        yield quant_matmul_launches(x, weight, None, out, H100)[index]


def counts() -> Iterator[Launch]:
    for tokens in SIZES:
        yield add_tokens_launch(int32(64, 32000), int32(tokens), int32(tokens), False)


def draws(index: int) -> Iterator[Launch]:
    for rows in SIZES:
        params = SamplingTensors(
            temperature=floats(rows),
            top_k=int32(rows),
            top_p=floats(rows),
            min_p=floats(rows),
            seed=int64(rows),
            sample_index=int32(rows),
            position=int64(rows),
        )
        out = SampledTokens(token_ids=int64(rows), invalid=empty(rows, dtype=torch.bool))
        yield sample_launches(empty(rows, 32000), params, out, 32000, False)[index]


def logprobs(index: int) -> Iterator[Launch]:
    """Whatever number of them requests ask for."""
    for rows in SIZES:
        for count in (0, 1, 2, 16, 20):
            out = TopLogprobs(
                chosen=floats(rows), ids=int32(rows, count), values=floats(rows, count)
            )
            logits = empty(rows, 32000)
            yield top_logprobs_launches(logits, int32(rows), int64(rows), out, 32000)[index]


@pytest.mark.parametrize(
    "launches",
    [
        pytest.param(norms, id="rms_norm"),
        pytest.param(gates, id="gated"),
        pytest.param(embeddings, id="embedding"),
        pytest.param(products, id="matmul"),
        pytest.param(lambda: quantised_products(0), id="quant_matmul"),
        pytest.param(lambda: quantised_products(1), id="sum of splits"),
        pytest.param(counts, id="add_tokens"),
        *(pytest.param(lambda i=i: draws(i), id=f"sample {i}") for i in range(6)),
        *(pytest.param(lambda i=i: logprobs(i), id=f"top_logprobs {i}") for i in range(2)),
    ],
)
def test_one_binary_serves_every_batch(launches: Callable[[], Iterator[Launch]]) -> None:
    assert len({identity(launch) for launch in launches()}) == 1
