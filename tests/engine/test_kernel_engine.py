"""The engine on Triton's kernels, in the interpreter, against dense attention in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rows_apart import rows_apart
from step_plans import step_plan

from kvferry.bench.engine_check import Setting, largest_error, on_backend, random_decoder
from kvferry.cache.paged import PagedKV
from kvferry.engine.runner import ModelRunner
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
# float32: sums in another order, through two layers. bfloat16: roundings of each sum, too. int8 and
# FP8: a quantised cache's keys are weighted in bfloat16, and some element is rounded the other way.
BOUNDS = {
    torch.float32: 2e-5,
    torch.float16: 2**-8,
    torch.bfloat16: 2**-4,
    torch.int8: 2**-6,
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


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_batch_invariant_logits_do_not_depend_on_neighbours(
    kv_dtype: torch.dtype, seeded: int
) -> None:
    """Bit for bit: alone and in the last row of a batch, in a prefill and in a draft step. Two
    prompts do not fit in the workspace of a quantised cache together.
    """
    setting = Setting(
        backend=Backend.TRITON_BATCH_INVARIANT,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=kv_dtype,
    )
    decoder = on_backend(random_decoder(parse_spec(CONFIG), seeded), setting)
    tokens = np.random.default_rng(seeded).integers(96, size=40).tolist()
    chunks, neighbours = (18, 2), ([7] * 3, [8] * 17)

    def logits_of(row: int, width: int) -> torch.Tensor:
        """Of the sequence in one row of a batch, after each of its chunks."""
        kv = PagedKV.allocate(
            num_layers=2,
            num_kv_heads=1,
            head_dim=64,
            block_size=16,
            num_blocks=16,
            dtype=kv_dtype,
        )
        runner, done, found = ModelRunner(decoder, kv, 96), 0, []
        tables = [[4 * i, 4 * i + 1] for i in range(width)]
        for chunk in chunks:
            queries = [neighbours[i % 2] for i in range(width)]
            queries[row] = tokens[done : done + chunk]
            contexts = [0] * width
            contexts[row] = done
            with torch.inference_mode():
                logits = runner.logits(step_plan(queries, contexts, tables))
            found.append(logits[row])
            done += chunk
        return torch.stack(found)

    with rows_apart():
        alone, among_others = logits_of(0, 1), logits_of(2, 3)
    assert torch.isfinite(alone).all()
    assert torch.equal(among_others, alone)
