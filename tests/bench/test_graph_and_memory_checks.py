"""What `make gpu` checks of graphs and memory, played on the CPU with a fake capture and device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_capture import FakeCapture, FakeGraph

from kvferry.bench.engine_check import CONFIG, Setting, on_backend, random_decoder
from kvferry.bench.graph_check import Sizes, check_graphs
from kvferry.bench.memory_check import SLACK, check_memory
from kvferry.cache.paged import block_nbytes
from kvferry.core.config import PoolConfig
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder
from kvferry.models.spec import parse_spec

SMALL = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(parse_spec(SMALL), seed=0)


class BrokenCapture(FakeCapture):
    """A graph that replays into the wrong rows."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> FakeGraph:
        return super().__call__(lambda: run().roll(1, dims=0))


@pytest.mark.slow
@pytest.mark.parametrize(("capture", "wrong"), [(FakeCapture, 0), (BrokenCapture, 1)])
def test_a_graph_that_is_wrong_is_seen(
    decoder: Decoder, capture: type[FakeCapture], wrong: int
) -> None:
    setting = (Backend.TRITON_BATCH_INVARIANT, torch.float32, torch.float32, 0.0)
    rows, claims = check_graphs(
        torch.device("cpu"),
        lambda device: capture(),
        lambda: None,
        decoder=decoder,
        settings=[setting],
        sizes=Sizes(batches=(2,), query_lens=(1,), context_len=20, repeats=1),
    )
    assert [row["outcome"] for row in rows] == ["WRONG" if wrong else "right"]
    assert {claim.id: claim.value for claim in claims}["gpu.graphs_wrong"] == wrong


class HostMemory:
    """A device of 1 MB; ``extra`` is what others take once the cache is there."""

    def __init__(self, step: int, extra: int = 0) -> None:
        self._step, self._extra = step, extra
        self._looks = 0

    def settle(self) -> None:
        """Nothing is kept for reuse."""

    def allocated(self) -> int:
        return 0

    def peak_allocated(self) -> int:
        return self._step

    def free_and_total(self) -> tuple[int, int]:
        self._looks += 1
        free = 10**6 if self._looks == 1 else 10**5 - self._extra
        return free, 10**6


@pytest.mark.parametrize("extra", [0, SLACK + 10])
def test_a_device_that_is_filled_beyond_its_share_is_seen(decoder: Decoder, extra: int) -> None:
    setting = Setting(
        backend=Backend.TORCH,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=torch.float32,
    )
    pool = PoolConfig(max_batch_tokens=64, max_batch_seqs=4, gpu_memory=0.9)
    one = 4 * block_nbytes(
        num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32
    )
    rows, claims = check_memory(
        torch.device("cpu"),
        HostMemory(one + 5000, extra),
        decoder=on_backend(decoder, setting),
        pool=pool,
    )
    assert rows[0]["step as profiled"] == "5.0 KB"
    assert rows[0]["blocks"] == (900_000 - 5000) // (one // 4)
    assert [claim.met for claim in claims] == [extra == 0]
