"""Greedy output of a real model is equal, token for token, to that of ``transformers``.

float32 leaves near-ties: a first difference is accepted only where a float64 reference puts the two
candidates within 1e-3 of each other, and what follows it is another text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from local_system import local_config, local_system
from near_ties import NearTies
from rank_workers import rank_threads
from real_prompts import real_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvferry.core.config import EMBEDDED_MODEL, ModelConfig, PoolConfig
from kvferry.engine.backend import Backend
from kvferry.engine.loading import load_backend
from kvferry.models.load import resolve
from kvferry.models.tokenizer import Tokenizer

pytestmark = pytest.mark.model

NUM_TOKENS = 24
BATCH = 7
EOS = 2
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Reference:
    """What ``transformers`` says."""

    folder: Path
    vocab_size: int
    prompts: list[list[int]]
    answers: list[list[int]]
    ties: NearTies


def load_reference(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def exact_logits(folder: Path) -> Callable[[Sequence[int]], Tensor]:
    """float64 logits of the next token. The weights are loaded when the first near-tie is met."""
    load = cache(lambda: load_reference(folder, torch.float64))

    def exact(tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return load()(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1]

    return exact


def reference_answers(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of each prompt up to and with the end token, in left-padded batches."""
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        width = max(len(prompts[i]) for i in numbers)
        ids = torch.tensor([[EOS] * (width - len(prompts[i])) + prompts[i] for i in numbers])
        lengths = torch.tensor([[len(prompts[i])] for i in numbers])
        mask = (torch.arange(width) >= width - lengths).long()
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        for i, row in zip(numbers, out[:, width:].tolist(), strict=True):
            answers[i] = row[: row.index(EOS) + 1] if EOS in row else row
    return [answers[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    torch.set_num_threads(1)
    folder = resolve(EMBEDDED_MODEL, torch.float32)
    tokenizer = Tokenizer(folder)
    prompts = real_prompts(tokenizer)
    assert len(prompts) == 20
    model = load_reference(folder, torch.float32)
    answers = reference_answers(model, prompts)
    ties = NearTies(exact_logits(folder))
    yield Reference(folder, tokenizer.vocab_size, prompts, answers, ties)
    print(f"\nnear-ties accepted: {len(ties.found)}", *ties.found, sep="\n  ")


@pytest.fixture(scope="module")
def backend(reference: Reference) -> Callable[[int], Backend]:
    """All workers map the same weights."""
    model = ModelConfig(dtype="float32", max_model_len=MAX_MODEL_LEN)

    def load(block_size: int) -> Backend:
        pool = PoolConfig(block_size=block_size, kv_memory="128MiB")
        return load_backend(reference.folder, reference.vocab_size, model, pool, "pool")

    return load


SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "colocated": {
        "prefill": {"workers": 0},
        "decode": {"role": "both", "block_size": 16, "max_batch_tokens": 256},
    },
    "1P1D": {
        "prefill": {"block_size": 16, "max_batch_tokens": 256},
        "decode": {"block_size": 32},
    },
    "2P2D": {
        "prefill": {"workers": 2, "block_size": 24, "max_batch_tokens": 96},
        "decode": {"workers": 2, "block_size": 16},
    },
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.timeout(120)
async def test_greedy_output_is_the_reference_s(
    name: str, reference: Reference, backend: Callable[[int], Backend]
) -> None:
    sections = {**SYSTEMS[name], "transfer": {"staging": "8MiB", "slab": "1MiB"}}
    config = local_config(**sections, model={"dtype": "float32"}, cluster={"silence_s": 60.0})
    async with local_system(config, backend) as system:
        answers = await asyncio.gather(
            *(system.generate(prompt, max_tokens=NUM_TOKENS) for prompt in reference.prompts)
        )
        await system.settled()
        used = {t.prefill_worker for t in system.timelines}
        assert used == {w for w in system.workers if not w.startswith("decode")}
        assert sum(t.attempts for t in system.timelines) == len(answers)
    for number, tokens in enumerate(answers):
        prompt, expected = reference.prompts[number], reference.answers[number]
        reference.ties.compare(f"{name}, prompt {number}", prompt, tokens, expected)


@pytest.mark.timeout(240)
async def test_three_ranks_on_either_side_say_the_same(reference: Reference) -> None:
    """SmolLM2 has 9 query and 3 KV heads; ranks sum in another order than one alone."""
    config = local_config(
        model={"dtype": "float32", "max_model_len": MAX_MODEL_LEN},
        prefill={"tp": 3, "block_size": 16, "kv_memory": "64MiB", "max_batch_tokens": 256},
        decode={"tp": 3, "block_size": 32, "kv_memory": "64MiB"},
        transfer={"transport": "tcp", "staging": "8MiB", "slab": "1MiB"},
        cluster={"silence_s": 120.0},
    )
    prompts = reference.prompts[:8]
    with rank_threads(reference.folder, config, vocab_size=reference.vocab_size) as ranks:
        prefill, decode = ranks.backend("prefill"), ranks.backend("decode")
        async with local_system(config, prefill, decode_backend=decode) as system:
            answers = await asyncio.gather(
                *(system.generate(prompt, max_tokens=NUM_TOKENS) for prompt in prompts)
            )
            await system.settled()
    for number, tokens in enumerate(answers):
        prompt, expected = prompts[number], reference.answers[number]
        reference.ties.compare(f"three ranks, prompt {number}", prompt, tokens, expected)
