"""B008: the first token, sampled where the prompt was computed, obeys every stop rule.

Then nothing is decoded, nothing is shipped, and both sides are free again; whoever serves it and
however it is asked for.
"""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_model import EOS, expected
from gates import HoldAt
from local_system import LocalSystem, fake_backend, local_config, local_system

from kvferry.core.request import FinishReason
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.slow

PROMPT = list(range(10, 31))
FIRST = expected(PROMPT, 1)[0]
OTHER_EOS = 95
POOLS: dict[str, dict[str, Any]] = {
    "PD": {"decode": {"block_size": 8}},
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both"}},
}
ENDS: dict[str, dict[str, Any]] = {
    "end token": {"logit_bias": {EOS: 100.0}},
    "another end token": {"logit_bias": {OTHER_EOS: 100.0}},
    "stop token": {"stop_token_ids": (FIRST,)},
    "last of many stop tokens": {"stop_token_ids": (90, 91, 92, 93, 94, FIRST)},
    "stop token where end tokens are ignored": {"stop_token_ids": (FIRST,), "ignore_eos": True},
    "end token that max_tokens would end too": {"logit_bias": {EOS: 100.0}, "max_tokens": 1},
}


def backend(block_size: int):
    return fake_backend(block_size, eos=(EOS, OTHER_EOS))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("pools", POOLS)
async def test_nothing_is_decoded_after_it(pools: str, end: str) -> None:
    gate = HoldAt()
    config = local_config(**POOLS[pools])
    async with local_system(config, backend, decode_gate=gate) as system:
        (step,) = await system.steps(PROMPT, **ENDS[end])
        assert len(step.token_ids) == 1
        assert step.finish_reason is FinishReason.STOP
        assert "decoding" not in gate.seen
        assert system.timelines[0].transfer_bytes == 0
        await system.settled()
        assert await system.generate(PROMPT) == expected(PROMPT, 8)


@pytest.mark.parametrize("pools", POOLS)
async def test_with_ignore_eos_it_goes_on(pools: str) -> None:
    async with local_system(local_config(**POOLS[pools]), backend) as system:
        steps = await system.steps(PROMPT, logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=4)
        assert [token for step in steps for token in step.token_ids] == [EOS] * 4
        assert steps[-1].finish_reason is FinishReason.LENGTH
        await system.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("pools", POOLS)
async def test_over_http(pools: str, n: int, ignore_eos: bool, stream: bool) -> None:
    body = {
        "prompt": PROMPT,
        "logit_bias": {str(EOS): 100},
        "ignore_eos": ignore_eos,
        "max_tokens": 5,
        "n": n,
        "stream": stream,
    }
    expected_text = chr(EOS) * 5 if ignore_eos else ""
    async with local_system(local_config(**POOLS[pools]), backend) as system:
        texts, reasons, counts = await ask(system, body | usage_of(stream))
        assert texts == [expected_text] * n
        assert reasons == ["length" if ignore_eos else "stop"] * n
        assert counts["completion_tokens"] == n * (5 if ignore_eos else 1)
        await system.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_in_the_first_token(stream: bool) -> None:
    body = {"prompt": PROMPT, "stop": [chr(FIRST)], "temperature": 0, "stream": stream}
    async with local_system(local_config(), backend) as system:
        texts, reasons, _ = await ask(system, body | usage_of(stream))
        assert (texts, reasons) == ([""], ["stop"])
        await system.settled()


async def test_over_grpc() -> None:
    request = kvferry_pb2.GenerateRequest(
        token_ids=kvferry_pb2.TokenIds(ids=PROMPT),
        sampling=kvferry_pb2.SamplingParams(logit_bias={EOS: 100.0}, max_tokens=5),
    )
    async with (
        local_system(local_config(), backend) as system,
        system.apis() as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        answers = [a async for a in kvferry_pb2_grpc.KvferryStub(channel).Generate(request)]
        assert "".join(answer.text for answer in answers) == ""
        assert answers[-1].finish_reason == "stop"
        assert answers[-1].usage.completion_tokens == 1
        await system.settled()


def usage_of(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}


async def ask(
    system: LocalSystem, body: dict[str, Any]
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Texts and finish reasons in the order of the choices, and the usage."""
    async with system.apis() as (_, base_url), httpx.AsyncClient(timeout=30) as client:
        response = await client.post(f"{base_url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
    if not body["stream"]:
        whole = response.json()
        choices = sorted(whole["choices"], key=lambda choice: choice["index"])
        return (
            [choice["text"] for choice in choices],
            [choice["finish_reason"] for choice in choices],
            whole["usage"],
        )
    events = [json.loads(e[6:]) for e in response.text.split("\n\n") if e and "[DONE]" not in e]
    texts = [""] * body.get("n", 1)
    reasons = [""] * body.get("n", 1)
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return texts, reasons, events[-1]["usage"]
