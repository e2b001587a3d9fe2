"""KV leaves while later layers are computed, and never before it is there.

The fake model writes layer by layer, and a decode worker that got a layer too early finds what was
in those blocks before: WrongKV, or another token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine_model import EOS, expected
from gates import HoldAt, eventually
from local_system import LocalSystem, fake_backend, local_config, local_system

from kvferry.cache.hashing import chain_hashes
from kvferry.cache.paged import PagedKV
from kvferry.engine.backend import Backend
from kvferry.engine.plan import StepPlan
from kvferry.engine.ports import Gate
from kvferry.engine.sequences import WorkerSequence

pytestmark = pytest.mark.slow

PROMPT = list(range(10, 47))  # 37 tokens: three chunks of at most 16
NUM_LAYERS = 6
TOKEN_NBYTES = NUM_LAYERS * 2 * 4 * 8


class LayerGate:
    """Stops the prefill worker before it writes a layer, for as long as it is shut."""

    def __init__(self, layer: int, chunk: int = 0) -> None:
        """``chunk``: the step, counted from 0 among those that compute prompts."""
        self._layer, self._chunk = layer, chunk
        self._steps: list[int] = []
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, plan: StepPlan, layer: int) -> None:
        if plan.step not in self._steps:
            self._steps.append(plan.step)
        if (layer, self._steps.index(plan.step)) == (self._layer, self._chunk):
            self._reached.set()
            assert self._opened.wait(30), "the gate was never opened"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 20), "this layer was never reached"

    def open(self) -> None:
        self._opened.set()


@dataclass(slots=True)
class Pushing:
    """A system, and what lies in its caches."""

    system: LocalSystem
    caches: dict[str, PagedKV]

    def role(self, name: str) -> Any:
        return self.system.workers[name].role

    async def reserved(self) -> WorkerSequence:
        """The one sequence on the decode worker, once it is there and has blocks."""
        sequences = self.role("decode-0").sequences
        await eventually(lambda: any(seq.blocks for seq in sequences))
        (seq,) = sequences
        return seq

    def tokens_there(self, seq: WorkerSequence) -> list[int]:
        """Of each layer, how many leading tokens the decode worker's cache has."""
        kv = self.caches["decode-0"]
        table = np.asarray(seq.blocks).repeat(kv.block_size) * kv.block_size
        slots = (table + np.tile(np.arange(kv.block_size), len(seq.blocks)))[: seq.length]
        values = kv.slots[:, 1, slots, 0, 1]  # -(position + 1) where it was written
        written = values == -torch.arange(1, seq.length + 1)
        return [int(layer.int().cumprod(0).sum()) for layer in written]


@asynccontextmanager
async def pushing(
    before_layer: Any = None,
    eos: tuple[int, ...] = (),
    prefill_gate: Gate | None = None,
    decode_gate: Gate | None = None,
    transfer: dict[str, Any] | None = None,
) -> AsyncIterator[Pushing]:
    """Every layer is sent as soon as it is done; blocks of 4 and 8; slabs so small that each layer
    is worth one.
    """
    config = local_config(
        prefill={"block_size": 4},
        decode={"block_size": 8},
        transfer={"push": "layers", "slab": 768, "staging": "64KiB"} | (transfer or {}),
    )
    caches = {}

    def prefill(size: int) -> Backend:
        backend = fake_backend(size, eos=eos, num_layers=NUM_LAYERS, before_layer=before_layer)
        caches["prefill-0"] = backend.kv
        return backend

    def decode(size: int) -> Backend:
        backend = fake_backend(size, eos=eos, num_layers=NUM_LAYERS)
        caches["decode-0"] = backend.kv
        return backend

    gates = {"prefill_gate": prefill_gate, "decode_gate": decode_gate}
    async with local_system(config, prefill, decode_backend=decode, **gates) as system:
        yield Pushing(system, caches)


@pytest.mark.parametrize("push", ["layers", "whole", "auto"])
async def test_the_answer_does_not_depend_on_when_kv_is_sent(push: str) -> None:
    async with pushing(transfer={"push": push}) as here:
        system = here.system
        prompts = [[i, *PROMPT[: 5 * i]] for i in range(1, 9)]
        answers = await asyncio.gather(*(system.generate(p, max_tokens=12) for p in prompts))
        assert answers == [expected(p, 12) for p in prompts]
        for prompt, timeline in zip(prompts, system.timelines, strict=True):
            assert timeline.transfer_bytes == len(prompt) * TOKEN_NBYTES
        await system.settled()


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("layer", [1, 3, 5])
async def test_layers_arrive_while_later_ones_are_computed(layer: int, chunk: int) -> None:
    gate = LayerGate(layer, chunk)
    async with pushing(gate) as here:
        answer = asyncio.create_task(here.system.generate(PROMPT, max_tokens=12))
        await gate.reached()
        seq = await here.reserved()
        before, now = 16 * chunk, min(16 * (chunk + 1), len(PROMPT))
        await eventually(lambda: here.tokens_there(seq)[:layer] == [now] * layer)
        # Chunks that were done before the link was up may go with later ones.
        assert max(here.tokens_there(seq)[layer:]) <= before
        assert here.system.timelines[0].prefill_s == 0, "the first token came before its layers"
        gate.open()
        assert await answer == expected(PROMPT, 12)
        assert here.system.timelines[0].transfer_bytes == len(PROMPT) * TOKEN_NBYTES
        await here.system.settled()


async def test_what_is_sent_whole_waits_for_the_last_layer() -> None:
    gate = LayerGate(NUM_LAYERS - 1, 2)
    async with pushing(gate, transfer={"push": "whole"}) as here:
        answer = asyncio.create_task(here.system.generate(PROMPT, max_tokens=4))
        await gate.reached()
        seq = await here.reserved()
        assert here.tokens_there(seq) == [0] * NUM_LAYERS
        gate.open()
        assert await answer == expected(PROMPT, 4)


@pytest.mark.parametrize("held", [0, 5, 8, 19, 36])
async def test_only_what_the_decode_side_lacks_is_sent(held: int) -> None:
    """B013, layer by layer: the fetch begins where the local hit ends, in blocks of its own."""
    gate = HoldAt()
    async with pushing(decode_gate=gate) as here:
        system, kv = here.system, here.caches["decode-0"]
        first = expected(PROMPT[:held], 1) if held else []
        if held:
            # The decode worker computes the KV of the first token it is told.
            await system.generate(PROMPT[:held], max_tokens=2)
            await system.settled()
        prompt = [*PROMPT[:held], *first, *PROMPT]
        sequences = here.role("decode-0").sequences
        owned = sequences.pool.match(chain_hashes(sequences.root, prompt, 8))
        assert len(owned) == len([*PROMPT[:held], *first]) // 8
        # Whoever writes these blocks again would make them right.
        kv.tensor[:, :, owned] += 0.5
        damaged = kv.tensor[:, :, owned].clone()
        gate.hold("reserved")
        answer = asyncio.create_task(system.generate(prompt, max_tokens=8))
        seq = await here.reserved()
        await eventually(lambda: seq.verified)
        assert torch.equal(kv.tensor[:, :, owned], damaged)
        kv.tensor[:, :, owned] -= 0.5
        gate.open()
        assert await answer == expected(prompt, 8)
        sent = len(prompt) - 8 * len(owned)
        assert system.timelines[-1].transfer_bytes == sent * TOKEN_NBYTES


async def test_what_the_prefill_side_has_cached_goes_out_before_anything_is_computed() -> None:
    gate = LayerGate(0, 1)
    async with pushing(gate) as here:
        await here.system.generate(PROMPT[:13], max_tokens=1)
        answer = asyncio.create_task(here.system.generate(PROMPT, max_tokens=8))
        await gate.reached()
        seq = await here.reserved()
        await eventually(lambda: here.tokens_there(seq) == [12] * NUM_LAYERS)
        gate.open()
        assert await answer == expected(PROMPT, 8)
        assert here.system.timelines[-1].cached_tokens_prefill == 12


async def test_a_request_given_up_between_two_layers() -> None:
    gate = LayerGate(3, 1)
    async with pushing(gate) as here:
        answer = asyncio.create_task(here.system.generate(PROMPT))
        await gate.reached()
        seq = await here.reserved()
        await eventually(lambda: here.tokens_there(seq)[:3] == [32] * 3)
        answer.cancel()
        await eventually(lambda: not len(here.role("decode-0").sequences))
        gate.open()
        await here.system.settled()
        # The decode worker has ended its lease, and may say so before the prefill worker gives up.
        assert here.role("prefill-0").endings in ({"aborted": 1}, {"failed: ended": 1})
        assert here.role("decode-0").endings.total() == 1
        assert await here.system.generate(PROMPT) == expected(PROMPT, 8)


async def test_a_first_token_that_ends_the_answer_aborts_what_is_on_its_way() -> None:
    async with pushing(eos=(EOS,)) as here:
        for length in (3, 16, 17, 37):
            steps = await here.system.steps(PROMPT[:length], logit_bias={EOS: 100.0})
            assert [step.token_ids for step in steps] == [(EOS,)]
        await here.system.settled()
        # Short prompts may be through before they are aborted.
        assert here.role("prefill-0").endings.total() == 4
        assert here.role("decode-0").endings.total() == 4


@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_a_session_lost_between_two_layers(side: str) -> None:
    gate = LayerGate(3, 1)
    async with pushing(gate) as here:
        answer = asyncio.create_task(here.system.generate(PROMPT, max_tokens=12))
        await gate.reached()
        here.system.dial.streams[side].cut()
        gate.open()
        assert await answer == expected(PROMPT, 12)
        assert here.system.timelines[0].attempts == 2
        await here.system.settled()


async def test_a_lease_that_ends_early_stops_nobody_else_s_prompt() -> None:
    """The decode worker gives up one of three prompts whose chunks share the prefill's steps."""
    gate = LayerGate(3)
    prompts = [[i, 50, 51, 52, 53] for i in range(3)]
    async with pushing(gate) as here:
        tasks = [asyncio.create_task(here.system.generate(p)) for p in prompts]
        await gate.reached()
        decode = here.role("decode-0")
        await eventually(lambda: len(decode.sequences) == 3)
        doomed = next(iter(decode.sequences))
        here.system.workers["decode-0"].receiver.release(doomed.lease)
        await eventually(lambda: len(decode.sequences) < 3 or doomed not in list(decode.sequences))
        gate.open()
        assert await asyncio.gather(*tasks) == [expected(p, 8) for p in prompts]
        attempts = sorted(timeline.attempts for timeline in here.system.timelines)
        assert attempts == [1, 1, 2]
        await here.system.settled()


async def test_a_step_that_fails_between_two_layers_is_taken_up_where_it_was() -> None:
    """Its sequences are tried again one by one; what was sent of them stays right."""
    failed: list[int] = []

    def fail_once(plan: StepPlan, layer: int) -> None:
        if layer == 3 and len(plan.query_lens) > 1 and not failed:
            failed.append(plan.step)
            raise RuntimeError("the device fell over")

    # The second one's chunk is what the first leaves of 16 tokens, and no longer when tried again.
    prompts = [[0, *PROMPT[:5]], [1, *PROMPT]]
    hold = HoldAt("waiting")
    async with pushing(fail_once, prefill_gate=hold) as here:
        tasks = [asyncio.create_task(here.system.generate(p)) for p in prompts]
        await eventually(lambda: len(here.role("prefill-0").sequences) == 2)
        hold.open()
        assert await asyncio.gather(*tasks) == [expected(p, 8) for p in prompts]
        assert failed
        assert [timeline.attempts for timeline in here.system.timelines] == [1, 1]
        await here.system.settled()
