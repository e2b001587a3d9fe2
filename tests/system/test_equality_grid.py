"""One request, one answer: whatever the ranks on either side, the chunks, the pools, the neighbours
and the pressure. Tiny float64 model, against the reference.

Every pair of values of {TP on P, TP on D, chunk, preemption} is covered for separate pools, and
every pair of {TP, chunk} and {TP, preemption} for the colocated one. In each setting run greedy and
seeded requests with one and three samples, beside neighbours that are cancelled on their way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from gates import PreemptEvery
from local_system import LocalSystem, local_config, local_system
from rank_workers import rank_threads
from tiny_models import some_tokens
from tiny_system import TinyModel, make_tiny

from kvferry.engine.ports import OpenGate, Relief

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DEGREES = (1, 2, 3, 4)
CHUNKS = (1, 5, 16, 64)
PRESSURES: tuple[Relief | None, ...] = (None, Relief.SWAP, Relief.GIVE_BACK, None)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.2, "top_p": 0.9, "seed": 12},
)
NUM_TOKENS = 7


@dataclass(frozen=True, slots=True)
class Setting:
    """One system. ``prefill_tp`` None: colocated."""

    prefill_tp: int | None
    decode_tp: int
    chunk: int
    relief: Relief | None

    def __str__(self) -> str:
        pools = f"{self.prefill_tp}P-{self.decode_tp}D" if self.prefill_tp else "both"
        return f"{pools}-tp{self.decode_tp}-chunk{self.chunk}-{self.relief or 'calm'}"


def all_pairs() -> list[Setting]:
    """An orthogonal array over the field with four elements: any two columns hold all pairs."""
    settings = []
    for a, b in itertools.product(range(4), repeat=2):
        relief = PRESSURES[a ^ (0, 2, 3, 1)[b]]
        settings.append(Setting(DEGREES[a], DEGREES[b], CHUNKS[a ^ b], relief))
        if a in (b, 3 - b):  # two of each degree: its chunks and pressures
            settings.append(Setting(None, DEGREES[a], CHUNKS[(a + b) % 4], PRESSURES[1 + b % 2]))
    return settings


SETTINGS = all_pairs()


def test_the_settings_cover_every_pair() -> None:
    split = [s for s in SETTINGS if s.prefill_tp]
    columns = [(s.prefill_tp, s.decode_tp, s.chunk) for s in split]
    for i, j in itertools.combinations(range(3), 2):
        assert len({(row[i], row[j]) for row in columns}) == 16
    for index in range(3):
        assert {(row[index], s.relief) for row, s in zip(columns, split, strict=True)} == set(
            itertools.product({row[index] for row in columns}, PRESSURES)
        )
    assert {s.decode_tp for s in SETTINGS if not s.prefill_tp} == set(DEGREES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def config_of(setting: Setting) -> Any:
    local = setting.prefill_tp is None
    return local_config(
        model={"dtype": "float64", "max_model_len": 128},
        prefill={
            "workers": 0 if local else 1,
            "tp": setting.prefill_tp or 1,
            "kv_memory": "2MiB",
            "max_batch_tokens": setting.chunk,
        },
        decode={
            "role": "both" if local else "decode",
            "tp": setting.decode_tp,
            "block_size": 8,
            "kv_memory": "2MiB",
            "max_batch_tokens": setting.chunk,
        },
        transfer={"transport": "tcp", "staging": "1MiB", "slab": "256KiB"},
        cluster={"silence_s": 60.0},
    )


@dataclass(frozen=True, slots=True)
class Case:
    prompt: list[int]
    num_samples: int
    sampling: dict[str, Any]


def cases() -> Iterator[Case]:
    for number, sampling in enumerate(SAMPLINGS):
        for num_samples, length in ((1, 9 + number), (3, 16 + number)):
            yield Case(some_tokens(length, seed=length).tolist(), num_samples, sampling)


async def cancelled_neighbour(system: LocalSystem, seed: int) -> None:
    """A request whose client goes after its first tokens."""
    prompt = some_tokens(13, seed=seed).tolist()
    async with aclosing(system.stream(prompt, max_tokens=40, ignore_eos=True)) as steps:
        async for _ in steps:
            if seed % 2:
                return
            seed += 1


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
async def test_tokens_are_the_reference_s(setting: Setting, tiny: TinyModel) -> None:
    config = config_of(setting)
    gate = PreemptEvery(setting.relief) if setting.relief else OpenGate()
    wanted = list(cases())
    with rank_threads(tiny.folder, config) as ranks:
        prefill, decode = ranks.backend("prefill"), ranks.backend("decode")
        async with local_system(config, prefill, decode_backend=decode, decode_gate=gate) as system:
            neighbours = [cancelled_neighbour(system, seed) for seed in (20, 21, 22)]
            answers = asyncio.gather(
                *(
                    system.choices(
                        case.prompt, case.num_samples, max_tokens=NUM_TOKENS, **case.sampling
                    )
                    for case in wanted
                )
            )
            await asyncio.gather(*neighbours)
            found = await answers
            await system.settled()
    for case, choices in zip(wanted, found, strict=True):
        for sample_index, tokens in enumerate(choices):
            expected = tiny.answer(
                case.prompt,
                tokens,
                sample_index=sample_index,
                max_tokens=NUM_TOKENS,
                **case.sampling,
            )
            assert tokens == expected.token_ids, (case, sample_index)
    if isinstance(gate, PreemptEvery):
        assert gate.count >= len(wanted)
