"""Tokens are those of the reference whatever the block sizes, chunks and cached prefixes; float64.

Every pair of values of {block size on P, block size on D, chunk, family} is covered for separate
pools, and every pair of {block size, chunk} for the colocated one. In each setting, prompts of one
to three blocks of either side, give or take a token, follow prefixes that are cached on both sides,
on one, or not at all. B013: a prefix that ends inside a block of the other side is continued
exactly where it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from local_system import LocalSystem, local_config, local_system
from tiny_models import VOCAB_SIZE
from tiny_system import TinyModel, make_tiny

pytestmark = pytest.mark.slow

P_BLOCKS, D_BLOCKS, CHUNKS = (1, 3, 4, 16), (1, 2, 8, 16), (1, 5, 16, 64)
FAMILIES = ("llama", "qwen2", "qwen3", "llama-bias")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.9},
)
PRIMED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """One system. ``p_block`` None: colocated."""

    p_block: int | None
    d_block: int
    chunk: int
    family: str

    def __str__(self) -> str:
        pools = f"{self.p_block}P-{self.d_block}D" if self.p_block else f"{self.d_block}both"
        return f"{pools}-chunk{self.chunk}-{self.family}"


def pairwise_settings() -> list[Setting]:
    """An orthogonal array over the field with four elements: any two columns hold all pairs."""
    settings = []
    for a, b in itertools.product(range(4), repeat=2):
        rows = a, b, a ^ b, a ^ (0, 2, 3, 1)[b]
        p, d, chunk, family = (values[i] for values, i in zip(_COLUMNS, rows, strict=True))
        settings.append(Setting(p, d, chunk, family))
        settings.append(Setting(None, d, CHUNKS[a], FAMILIES[a ^ b]))
    return settings


_COLUMNS: tuple[tuple[Any, ...], ...] = (P_BLOCKS, D_BLOCKS, CHUNKS, FAMILIES)
SETTINGS = pairwise_settings()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_tiny(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def covered() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    yield counts
    print("\ncovered:", ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


def test_the_settings_cover_every_pair() -> None:
    split = [s for s in SETTINGS if s.p_block]
    columns = [(s.p_block, s.d_block, s.chunk, s.family) for s in split]
    for i, j in itertools.combinations(range(4), 2):
        assert len({(row[i], row[j]) for row in columns}) == 16
    together = {(s.d_block, s.chunk) for s in SETTINGS if not s.p_block}
    assert len(together) == 16


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of ``length`` tokens, ``shared`` of which a request before it has had."""

    number: int
    length: int
    shared: int
    on_both: bool
    """The first request decoded too, so that both sides hold its prefix."""
    sampling: dict[str, Any]


def cases(setting: Setting, rng: random.Random) -> Iterator[Case]:
    sizes = {setting.p_block or setting.d_block, setting.d_block}
    around = {n * size + d for size in sizes for n in (1, 2, 3) for d in (-1, 0, 1)} - {0}
    for number, length in enumerate(sorted(around)):
        inside = [s for s in (length, length - 1, 1, *sizes, *(2 * s - 1 for s in sizes)) if s > 0]
        shared = rng.choice([0, *(s for s in inside if s <= length), rng.randrange(length + 1)])
        on_both = bool(rng.getrandbits(1)) and shared + PRIMED_TOKENS <= length
        yield Case(number, length, shared, on_both, rng.choice(SAMPLINGS) | {"seed": number})


async def play(system: LocalSystem, model: TinyModel, case: Case, rng: random.Random) -> str:
    """Run the case and check it; returns what it covered."""
    size_p, size_d = system.config.prefill.block_size, system.config.decode.block_size
    local = system.config.decode.role == "both"
    size_p = size_d if local else size_p
    # The first token makes it a conversation of its own.
    prompt = [case.number, *(rng.randrange(VOCAB_SIZE) for _ in range(case.length - 1))]
    held = case.shared
    if case.shared:
        count = PRIMED_TOKENS if case.on_both else 1
        primed = await system.generate(prompt[: case.shared], max_tokens=count, ignore_eos=True)
        if case.on_both:
            prompt[case.shared : case.shared + count] = primed
            held += count - 1
    if case.number % 3 == 0:
        await system.settled()
    timeline_index = len(system.timelines)
    tokens = await system.generate(prompt, max_tokens=6, **case.sampling)
    timeline = system.timelines[timeline_index]
    expected = model.answer(prompt, tokens, max_tokens=6, **case.sampling)
    assert tokens == expected.token_ids, (case, prompt)

    on_p = min(held if local else case.shared, case.length - 1) // size_p * size_p
    on_d = min(held, case.length) // size_d * size_d if case.on_both else 0
    assert timeline.cached_tokens_prefill == on_p, case
    if local:
        return "cached prefixes" if on_p else "cold prompts"
    assert timeline.cached_tokens_decode == on_d, case
    if on_d % size_p or on_p % size_d:
        return "prefixes that end inside a block of the other side"
    return "other cached prefixes" if on_p or on_d else "cold prompts"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
async def test_tokens_are_the_reference_s(
    setting: Setting,
    tiny: Callable[[str], TinyModel],
    covered: Counter[str],
    seeded: int,
) -> None:
    rng = random.Random(f"{seeded} {setting}")
    model = tiny(setting.family)
    local = setting.p_block is None
    config = local_config(
        prefill={
            "workers": 0 if local else 1,
            "block_size": setting.p_block or 16,
            "max_batch_tokens": setting.chunk,
        },
        decode={
            "role": "both" if local else "decode",
            "block_size": setting.d_block,
            "max_batch_tokens": setting.chunk,
        },
    )
    async with local_system(config, model.backends()) as system:
        played = list(cases(setting, rng))
        rng.shuffle(played)
        whats = await asyncio.gather(
            *(play(system, model, case, random.Random(rng.random())) for case in played)
        )
        await system.settled()
    covered.update(whats)
    covered["settings"] += 1
