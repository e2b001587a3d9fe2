"""Messages that no correct router sends: each costs its sender an answer, and nobody else a token.

The worker under attack serves an honest router at the same time, whose answers must not change.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engine_model import VOCAB_SIZE, expected
from gates import HoldAt, eventually
from local_system import LocalSystem, local_config, local_system

from kvferry.core.ids import Incarnation
from kvferry.engine.ports import FromRouter, SessionClosed, SessionOpened
from kvferry.proto import worker_pb2 as pb

PROMPT = list(range(20, 43))
ROLES = {"prefill-0": {}, "decode-0": {}, "both-0": {"decode": {"role": "both"}}}
WORKERS = list(ROLES)
ME = Incarnation(7)


@dataclass(eq=False)
class Intruder:
    """A router that says whatever it is told to, on a session of its own."""

    system: LocalSystem
    worker: str
    incarnation: Incarnation = ME
    messages: list[pb.WorkerMessage] = field(default_factory=list)

    def send(self, message: pb.WorkerMessage) -> None:
        self.messages.append(message)

    def open(self) -> None:
        self.system.workers[self.worker].loop.post(SessionOpened(self))

    def close(self) -> None:
        self.system.workers[self.worker].loop.post(SessionClosed(self))

    def say(self, **kind: Any) -> None:
        event = FromRouter(self, pb.RouterMessage(**kind))
        self.system.workers[self.worker].loop.post(event)

    def begin(self, key: pb.Key, spec: pb.SequenceSpec, **fields: Any) -> None:
        """What makes this worker begin a sequence."""
        if self.worker == "prefill-0":
            self.say(prefill=pb.Prefill(key=key, sequence=spec, **fields))
        else:
            local = self.worker == "both-0"
            self.say(reserve=pb.Reserve(key=key, sequence=spec, local=local))

    def heard(self, *kinds: str) -> list[Any]:
        found = [m for m in list(self.messages) if m.WhichOneof("kind") in kinds]
        return [getattr(m, m.WhichOneof("kind")) for m in found]


@asynccontextmanager
async def attacked(worker: str, **options: Any) -> AsyncIterator[tuple[LocalSystem, Intruder]]:
    sections = dict(ROLES[worker])
    if worker == "both-0":
        sections["prefill"] = {"workers": 0}
    async with local_system(local_config(**sections), **options) as system:
        intruder = Intruder(system, worker)
        intruder.open()
        yield system, intruder
        intruder.close()
        await system.settled()
        assert await system.generate(PROMPT[:3]) == expected(PROMPT[:3], 8)


def spec(**changes: Any) -> pb.SequenceSpec:
    sampling = {"max_tokens": 4, "top_p": 1.0, "repetition_penalty": 1.0}
    values = {"token_ids": [1, 2, 3, 4, 5], "prompt_len": 5, "deadline_s": 60.0}
    for name, value in changes.items():
        known = name in pb.Sampling.DESCRIPTOR.fields_by_name
        (sampling if known else values)[name] = value
    return pb.SequenceSpec(sampling=pb.Sampling(**sampling), **values)


WRONG = {
    "a token outside int32": {"token_ids": [1, 2**32 - 1], "prompt_len": 2},
    "no prompt": {"prompt_len": 0},
    "more prompt than tokens": {"prompt_len": 6},
    "a huge prompt_len": {"prompt_len": 2**32 - 1},
    "no max_tokens": {"max_tokens": 0},
    "nothing left": {"prompt_len": 1},
    "NaN deadline": {"deadline_s": math.nan},
    "NaN temperature": {"temperature": math.nan},
    "infinite temperature": {"temperature": math.inf},
    "negative temperature": {"temperature": -1.0},
    "top_k outside int32": {"top_k": 2**31},
    "top_p above one": {"top_p": 1.5},
    "NaN min_p": {"min_p": math.nan},
    "no repetition_penalty": {"repetition_penalty": 0.0},
    "NaN penalty": {"presence_penalty": math.nan},
    "a stop id outside int32": {"stop_token_ids": [2**31]},
    "a bias id outside int32": {"logit_bias": {2**31: 1.0}},
    "a NaN bias": {"logit_bias": {1: math.nan}},
    "a sample outside int32": {"sample_index": 2**31},
    "longer than the context": {"token_ids": [1] * 4000, "prompt_len": 4000},
}


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_wrong_sequence_is_refused_and_its_neighbours_go_on(worker: str) -> None:
    async with attacked(worker) as (system, intruder):
        under_way = asyncio.create_task(system.generate(PROMPT, max_tokens=60))
        for number, changes in enumerate(WRONG.values(), start=1):
            intruder.begin(pb.Key(request=number, attempt=1), spec(**changes))
        intruder.begin(pb.Key(request=100, attempt=2**31), spec())
        assert await under_way == expected(PROMPT, 60)
        await eventually(
            lambda: len(intruder.heard("failed", "refused")) == len(WRONG) + 1,
            what=f"{len(WRONG) + 1} refusals: {intruder.messages}",
        )
        assert not intruder.heard("granted", "prefill_done")
        assert all(refused.never for refused in intruder.heard("refused"))
        assert all(failed.kind == "refused" for failed in intruder.heard("failed"))


@pytest.mark.parametrize("worker", WORKERS)
async def test_ends_of_time(worker: str) -> None:
    """A deadline that has passed ends the sequence at once; none at all is no error."""
    async with attacked(worker) as (_, intruder):
        for number, deadline_s in enumerate((0.0, -1.0, -math.inf), start=1):
            intruder.begin(pb.Key(request=number, attempt=1), spec(deadline_s=deadline_s))
        intruder.begin(pb.Key(request=9, attempt=1), spec(deadline_s=math.inf))
        await eventually(lambda: len(intruder.heard("granted", "prefill_done")) == 1)
        assert [failed.kind for failed in intruder.heard("failed")] == ["deadline"] * 3


LAYOUT = pb.KvLayout(
    num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float64", tp=1, pp=1
)


def target(endpoint: str = "loopback:none", **fields: Any) -> pb.Target:
    """Well-formed but for ``fields``."""
    endpoints = [pb.KvEndpoint(endpoint=endpoint)]
    whole = {"endpoints": endpoints, "lease": 1, "layout": LAYOUT, "wire": "float64", "peer": 5}
    return pb.Target(**whole | fields)


def layout(**changes: Any) -> pb.KvLayout:
    changed = pb.KvLayout(**changes)
    merged = pb.KvLayout()
    merged.CopyFrom(LAYOUT)
    merged.MergeFrom(changed)
    return merged


TARGETS = {
    "no layout": target(layout=None),
    "no ranks": target(layout=pb.KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)),
    "an unknown type": target(layout=layout(dtype="int7")),
    "more stages than layers": target(layout=layout(pp=3)),
    "other layers": target(layout=layout(num_layers=3)),
    "other heads": target(layout=layout(num_kv_heads=2)),
    "another head size": target(layout=layout(head_dim=8)),
    "more cached than there is": target(cached_tokens=99),
    "no endpoint": target(endpoints=[]),
    "an endpoint of another rank alone": target(
        endpoints=[pb.KvEndpoint(rank=1, endpoint="loopback:none")]
    ),
    "nothing on the wire": target(wire=""),
    "an unknown type on the wire": target(wire="float7"),
}
UNSENDABLE = {
    "nobody's endpoint": target(),
    "an empty endpoint": target(""),
    "an odd endpoint": target("\0://", lease=2**64 - 1),
    "an unknown transport": target("pigeon:coop"),
}


async def test_a_target_that_cannot_be_is_refused() -> None:
    async with attacked("prefill-0") as (system, intruder):
        for number, wrong in enumerate(TARGETS.values(), start=1):
            intruder.begin(pb.Key(request=number, attempt=1), spec(), target=wrong)
        await eventually(lambda: len(intruder.heard("failed")) == len(TARGETS))
        assert {failed.kind for failed in intruder.heard("failed")} == {"refused"}
        assert await system.generate(PROMPT) == expected(PROMPT, 8)


@pytest.mark.parametrize("name", UNSENDABLE)
async def test_a_target_that_is_not_there_fails_the_transfer(name: str) -> None:
    async with attacked("prefill-0") as (system, intruder):
        intruder.begin(pb.Key(request=1, attempt=1), spec(), target=UNSENDABLE[name])
        await eventually(lambda: len(intruder.heard("failed")) == 1)
        assert intruder.heard("failed")[0].kind == "transfer"
        assert await system.generate(PROMPT) == expected(PROMPT, 8)


async def test_start_with_a_token_that_is_none() -> None:
    gate = HoldAt("waiting")
    async with attacked("decode-0", decode_gate=gate) as (_, intruder):
        key = pb.Key(request=1, attempt=1)
        intruder.say(start=pb.Start(key=key, token_id=1))
        intruder.begin(key, spec())
        intruder.say(start=pb.Start(key=key, token_id=1))
        gate.open()
        await eventually(lambda: len(intruder.heard("granted")) == 1)
        intruder.say(start=pb.Start(key=key, token_id=2**32 - 1))
        await eventually(lambda: len(intruder.heard("failed")) == 1)


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_session_opened_again_ends_what_the_earlier_one_began(worker: str) -> None:
    """A router reconnects before the worker has noticed that the old connection is gone."""
    gate = HoldAt("prefilling" if worker == "both-0" else "waiting")
    gates = {"prefill_gate": gate, "decode_gate": gate}
    async with attacked(worker, **gates) as (system, intruder):
        intruder.begin(pb.Key(request=1, attempt=1), spec())
        if worker == "both-0":
            intruder.say(prefill=pb.Prefill(key=pb.Key(request=1, attempt=1), sequence=spec()))
        await eventually(lambda: len(system.workers[worker].role.sequences) == 1)
        again = Intruder(system, worker)
        again.open()
        await eventually(lambda: len(system.workers[worker].role.sequences) == 0)
        intruder.close()
        intruder.begin(pb.Key(request=2, attempt=1), spec())  # from beyond the grave
        again.begin(pb.Key(request=3, attempt=1), spec())
        await eventually(lambda: len(system.workers[worker].role.sequences) > 0)
        (live,) = system.workers[worker].role.sequences
        assert live.key.request == 3
        again.close()
        gate.open()


def chaos(rng: random.Random, worker: str) -> dict[str, Any]:
    key = pb.Key(request=rng.randrange(1, 6), attempt=rng.randrange(1, 4))
    length = rng.randrange(0, 20)
    sequence = spec(
        token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(length)],
        prompt_len=rng.choice([length, length, 1]),
        max_tokens=rng.randrange(0, 30),
        deadline_s=rng.choice([60.0, 60.0, 0.01, math.inf]),
    )
    nowhere = target(lease=rng.randrange(4))
    return rng.choice(
        [
            {"reserve": pb.Reserve(key=key, sequence=sequence, local=rng.random() < 0.5)},
            {"reserve": pb.Reserve(key=key, sequence=sequence, local=worker == "both-0")},
            {"prefill": pb.Prefill(key=key, sequence=sequence)},
            {"prefill": pb.Prefill(key=key, sequence=sequence, target=nowhere)},
            {"start": pb.Start(key=key, token_id=rng.randrange(VOCAB_SIZE))},
            {"cancel": pb.Cancel(key=key)},
            {"renew": pb.Renew(keys=[key, pb.Key()])},
            {"hello": pb.RouterHello()},
            {},
        ]
    )


@pytest.mark.parametrize("worker", WORKERS)
async def test_any_message_in_any_state(worker: str, seeded: int) -> None:
    rng = random.Random(seeded)
    async with attacked(worker) as (system, intruder):
        for round_number in range(6):
            prompt = [round_number, *PROMPT]
            under_way = asyncio.create_task(system.generate(prompt, max_tokens=20))
            for _ in range(60):
                intruder.say(**chaos(rng, worker))
                if rng.random() < 0.05:
                    intruder.close()
                    intruder = Intruder(system, worker)
                    intruder.open()
                if rng.random() < 0.3:
                    await asyncio.sleep(0.001)
            assert await under_way == expected(prompt, 20)
        intruder.close()
