"""The engine on Triton's kernels, in the interpreter, against dense attention in plain torch."""

from __future__ import annotations

import pytest
import torch

from kvferry.bench.engine_check import Setting, largest_error, random_decoder
from kvferry.kernels.ops import Backend
from kvferry.models.spec import parse_spec

torch.set_num_threads(1)

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# float32: sums in another order, through two layers. int8 and FP8: the cache's own rounding, 1/254
# and 1/16 of a head's largest element at most, averaged over the keys.
BOUNDS = {
    torch.float32: 2e-5,
    torch.float16: 2**-8,
    torch.bfloat16: 2**-5,
    torch.int8: 2e-2,
    torch.float8_e4m3fn: 8e-2,
}


SETTINGS = [
    (Backend.TRITON, torch.float32, torch.float32, 16),
    (Backend.TRITON_BATCH_INVARIANT, torch.float32, torch.int8, 16),
    (Backend.TRITON, torch.float16, torch.float8_e4m3fn, 32),
    (Backend.TRITON, torch.bfloat16, torch.bfloat16, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype", "kv_dtype", "block_size"), SETTINGS)
def test_logits_of_all_steps(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int, seeded: int
) -> None:
    setting = Setting(
        backend=backend,
        device=torch.device("cpu"),
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        seed=seeded,
    )
    error = largest_error(random_decoder(parse_spec(CONFIG), seeded), setting)
    assert error <= max(BOUNDS[dtype], BOUNDS[kv_dtype])
