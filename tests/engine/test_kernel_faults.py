"""Faults of neighbours, stale blocks and limits, in the engine on kernels in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_plans import step_plan

from kvferry.bench.engine_check import (
    Setting,
    dense_logits,
    largest_error,
    on_backend,
    random_decoder,
)
from kvferry.cache.paged import PagedKV
from kvferry.engine.runner import ModelRunner
from kvferry.kernels.ops import Backend
from kvferry.models.spec import parse_spec

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

VOCAB, LIMIT, BLOCK = 96, 64, 16
BLOCKS_EACH = LIMIT // BLOCK
BAD = VOCAB - 1
"""A token whose embedding is NaN."""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": LIMIT,
    "rms_norm_eps": 1e-5,
}
# float32: sums in another order. int8: a quantised cache's keys are weighted in bfloat16.
BOUNDS = {torch.float32: 2e-5, torch.int8: 2**-6}


class Worker:
    """A runner on a cache without a written block: its elements are NaN, or their scales are."""

    def __init__(self, seed: int, num_sequences: int, kv_dtype: torch.dtype) -> None:
        self.dense = random_decoder(parse_spec(CONFIG), seed)
        self.dense.model.embed_tokens.weight.data[BAD] = torch.nan
        self.kv_dtype = kv_dtype
        self.kv = PagedKV.allocate(
            num_layers=1,
            num_kv_heads=1,
            head_dim=64,
            block_size=BLOCK,
            num_blocks=num_sequences * BLOCKS_EACH,
            dtype=kv_dtype,
        )
        (self.kv.tensor if self.kv.scales is None else self.kv.scales).fill_(torch.nan)
        setting = Setting(
            backend=Backend.TRITON,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_dtype=kv_dtype,
        )
        self.runner = ModelRunner(on_backend(self.dense, setting), self.kv, VOCAB)

    @torch.inference_mode()
    def check(self, sequences: list[list[int]], new: list[int], bad: tuple[int, ...] = ()) -> None:
        """Compute the last ``new`` tokens of each sequence, which has as many blocks as it needs.
        All but the ``bad`` rows get the logits of a dense run.
        """
        queries = [tokens[-count:] for tokens, count in zip(sequences, new, strict=True)]
        contexts = [len(tokens) - count for tokens, count in zip(sequences, new, strict=True)]
        tables = [
            [row * BLOCKS_EACH + i for i in range(-(-len(tokens) // BLOCK))]
            for row, tokens in enumerate(sequences)
        ]
        logits = self.runner.logits(step_plan(queries, contexts, tables))
        for row, tokens in enumerate(sequences):
            if row in bad:
                assert not torch.isfinite(logits[row]).all()
                continue
            expected = dense_logits(self.dense, torch.tensor(tokens), self.kv_dtype)[-1]
            error = float((logits[row] - expected).abs().max() / expected.abs().max())
            assert error <= BOUNDS[self.kv_dtype], row


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_a_sequence_gone_bad_and_unwritten_blocks_touch_no_other(
    kv_dtype: torch.dtype, seeded: int
) -> None:
    """In a prefill, in a draft and in a decode step, whose padding rows have block 0 as table."""
    worker = Worker(seeded, 3, kv_dtype)
    random = np.random.default_rng(seeded)
    bad, *others = (random.integers(BAD, size=size).tolist() for size in (25, 25, 40))
    bad[3] = BAD
    for ends, new in (
        ((18, 18, 33), (18, 18, 33)),
        ((21, 21, 36), (3, 3, 3)),
        ((22, 22, 37), (1,) * 3),
    ):
        parts = [tokens[:end] for tokens, end in zip((bad, *others), ends, strict=True)]
        worker.check(parts, list(new), bad=(0,))


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_a_draft_ends_at_exactly_the_context_limit(kv_dtype: torch.dtype, seeded: int) -> None:
    """In the last row of the last block of the cache (fault B025)."""
    worker = Worker(seeded, 1, kv_dtype)
    tokens = np.random.default_rng(seeded).integers(BAD, size=LIMIT).tolist()
    for end, new in ((LIMIT - 5, LIMIT - 5), (LIMIT - 1, 4), (LIMIT, 1), (LIMIT, 5), (LIMIT, 20)):
        worker.check([tokens[:end]], [new])


def test_a_cache_of_another_float_type_is_refused_at_the_start() -> None:
    """What can never work says so before the first step."""
    setting = Setting(
        backend=Backend.TRITON,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        kv_dtype=torch.float16,
    )
    with pytest.raises(ValueError, match=r"kv: .*bfloat16.*float16"):
        largest_error(random_decoder(parse_spec(CONFIG), 0), setting)
