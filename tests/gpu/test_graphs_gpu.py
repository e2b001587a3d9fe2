"""Steps on a CUDA device: replayed as graphs, and waited for apart from their launch."""

from __future__ import annotations

import pytest
import torch

from kvferry.bench.engine_check import Setting, random_decoder
from kvferry.bench.graph_check import Pair, Sizes, pair_of, step_of
from kvferry.engine.cuda_capture import CudaCapture
from kvferry.engine.memory import CudaMemory, profile_step
from kvferry.engine.plan import SamplingRows
from kvferry.kernels.ops import Backend
from kvferry.models.spec import parse_spec

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SIZES = Sizes(batches=(1, 3, 5, 16), query_lens=(1, 3), context_len=300)


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make_pair(backend: Backend, kv_dtype: torch.dtype = torch.bfloat16) -> Pair:
    setting = Setting(backend=backend, device=cuda(), dtype=torch.bfloat16, kv_dtype=kv_dtype)
    decoder = random_decoder(parse_spec(CONFIG), 0)
    return pair_of(decoder, setting, SIZES, CudaCapture(cuda()))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_batch_invariant_steps_have_the_same_bits(kv_dtype: torch.dtype) -> None:
    pair = make_pair(Backend.TRITON_BATCH_INVARIANT, kv_dtype)
    with torch.inference_mode():
        for num_seqs in SIZES.batches:
            for query_len in SIZES.query_lens:
                # Twice: the second replay finds what the first left in the static tensors.
                for context_len in (300, 7):
                    plan = step_of(pair, num_seqs, query_len, context_len)
                    assert pair.difference(plan) == 0


def test_a_full_bucket_has_the_same_bits_on_the_vendors_products() -> None:
    pair = make_pair(Backend.TRITON)
    with torch.inference_mode():
        for num_seqs in (1, 2, 16):
            assert pair.difference(step_of(pair, num_seqs, 1, 300)) == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_a_launched_step_yields_what_an_executed_one_does(graphs: bool) -> None:
    pair = make_pair(Backend.TRITON_BATCH_INVARIANT)
    runner = pair.graphs if graphs else pair.eager
    for seed in range(5):
        plan = step_of(pair, 5, 1, 300 - seed)
        plan.sampling = SamplingRows.greedy(5)
        plan.sampling.temperature[1:] = 1.0
        plan.sampling.seed[:] = seed
        plan.sampling.logprobs = {2: 3}
        flight = runner.launch(plan)
        plan.token_ids[:] = 0  # the step has its own copy by now
        launched = flight.wait()
        assert flight.done()
        again = step_of(pair, 5, 1, 300 - seed)
        again.sampling = plan.sampling
        executed = pair.eager.execute(again)
        assert launched.token_ids.tolist() == executed.token_ids.tolist()
        assert launched.logprobs == executed.logprobs


def test_a_profile_sees_what_a_step_takes_and_gives_back() -> None:
    memory = CudaMemory(cuda())

    def run() -> int:
        cache = torch.zeros(32 << 20, dtype=torch.uint8, device=cuda())
        torch.zeros(64 << 20, dtype=torch.uint8, device=cuda())
        return cache.nbytes

    first, second = (profile_step(memory, run) for _ in range(2))
    assert 64 << 20 <= first.step < 72 << 20
    assert abs(first.free - second.free) < 8 << 20
    assert first.total == second.total > first.free
