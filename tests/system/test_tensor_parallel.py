"""Workers of several ranks: any degree on either side, every answer the reference's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from local_system import local_config, local_system
from rank_workers import rank_threads
from tiny_models import some_tokens
from tiny_system import TinyModel, make_tiny

pytestmark = pytest.mark.timeout(120)

MAX_MODEL_LEN = 128
PROMPTS = [some_tokens(length, seed=length).tolist() for length in (3, 9, 17, 30)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def config_of(prefill_tp: int, decode_tp: int, **sections: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": "float64", "max_model_len": MAX_MODEL_LEN},
        "prefill": {"tp": prefill_tp, "block_size": 4, "kv_memory": "2MiB", "max_batch_tokens": 12},
        "decode": {"tp": decode_tp, "block_size": 8, "kv_memory": "2MiB"},
        "transfer": {"transport": "tcp", "staging": "1MiB", "slab": "256KiB"},
        "cluster": {"silence_s": 60.0},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return local_config(**base)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2), (3, 2), (4, 3)])
async def test_answers_are_the_reference_s(
    tiny: TinyModel, prefill_tp: int, decode_tp: int
) -> None:
    config = config_of(prefill_tp, decode_tp)
    with rank_threads(tiny.folder, config) as ranks:
        system = local_system(
            config, ranks.backend("prefill"), decode_backend=ranks.backend("decode")
        )
        async with system as running:
            answers = await asyncio.gather(*(running.generate(prompt) for prompt in PROMPTS))
            await running.settled()
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert tokens == tiny.answer(prompt).token_ids
