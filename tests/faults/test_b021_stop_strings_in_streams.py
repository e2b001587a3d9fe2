"""B021: no letter of a stop string that matches is ever sent; what was held back for one that does
not match comes at the end; the joined stream is the whole answer. Over every way to ask.
"""

from __future__ import annotations

import json
import string
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fake_engine import script
from fake_engine_model import expected
from local_system import local_config, local_system
from router_under_test import RouterUnderTest, running_router

from kvferry.core.request import FinishReason, TokenStep
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALPHABET = string.ascii_lowercase
# name -> (stop strings, tokens per step, text, stop string that ends it)
CASES: dict[str, tuple[list[str], int, str, str | None]] = {
    "seven letters, a token each": (["hijklmn"], 1, "abcdefg", "hijklmn"),
    "seven letters, steps of three tokens": (["hijklmn"], 3, "abcdefg", "hijklmn"),
    "one a prefix of the other": (["hij", "hijklmn"], 1, "abcdefg", "hij"),
    "one a prefix of the other, longer first": (["hijklmn", "hij"], 3, "abcdefg", "hij"),
    "one inside the other": (["ghijklm", "jk"], 1, "abcdefghi", "jk"),
    "at the very start": (["abc"], 1, "", "abc"),
    "at the very end": (["xyz"], 1, ALPHABET[:-3], "xyz"),
    "a near match at the very end": (["xyz!"], 1, ALPHABET, None),
    "a near match on the way": (["hijklmo"], 1, ALPHABET, None),
    "two near matches, one inside the other": (["ghijx", "hijklmo"], 3, ALPHABET, None),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[RouterUnderTest]:
    async with running_router() as router:
        yield router


@pytest.fixture
def router(shared: RouterUnderTest) -> RouterUnderTest:
    shared.engine.reset()
    return shared


def recite(router: RouterUnderTest, tokens_per_step: int) -> None:
    letters = ALPHABET.encode()
    steps = [
        TokenStep(tuple(letters[i : i + tokens_per_step]))
        for i in range(0, len(letters), tokens_per_step)
    ]
    steps[-1] = TokenStep(steps[-1].token_ids, finish_reason=FinishReason.LENGTH)
    router.engine.script = lambda request, index: steps


async def http_text(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[list[str], str | None, str]:
    """(pieces as they came, stop reason, finish reason)."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return [text], choice["stop_reason"], choice["finish_reason"]
    events = [json.loads(e[6:]) for e in response.text.split("\n\n") if e and "[DONE]" not in e]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]
    return pieces, choices[-1]["stop_reason"], choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("case", CASES)
async def test_http(router: RouterUnderTest, case: str, path: str, stream: bool) -> None:
    stops, tokens_per_step, text, stop = CASES[case]
    recite(router, tokens_per_step)
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [MESSAGE]}
    body = prompt | {"stop": stops, "stream": stream}
    pieces, stop_reason, finish_reason = await http_text(router.http, path, body)
    assert "".join(pieces) == text
    assert (stop_reason, finish_reason) == (stop, "stop" if stop else "length")


MESSAGE = {"role": "user", "content": "Recite the alphabet"}


@pytest.mark.parametrize("case", CASES)
async def test_grpc(router: RouterUnderTest, case: str) -> None:
    stops, tokens_per_step, text, stop = CASES[case]
    recite(router, tokens_per_step)
    request = kvferry_pb2.GenerateRequest(text="x", sampling=kvferry_pb2.SamplingParams(stop=stops))
    answers = [a async for a in kvferry_pb2_grpc.KvferryStub(router.channel).Generate(request)]
    assert "".join(answer.text for answer in answers) == text
    assert answers[-1].finish_reason == ("stop" if stop else "length")
    shown = [token for answer in answers for token in answer.token_ids]
    assert bytes(shown).decode() == text, "tokens are held back and cut with their text"


@pytest.mark.parametrize("stop", [["hijklmn"], "hijklmn"])
async def test_text_goes_out_as_soon_as_it_is_sure(router: RouterUnderTest, stop: Any) -> None:
    recite(router, 1)
    body = {"prompt": "x", "stop": stop, "stream": True}
    pieces, _, _ = await http_text(router.http, "/v1/completions", body)
    assert [piece for piece in pieces if piece] == list("abcdefg")


async def test_the_prompt_is_no_part_of_a_match(router: RouterUnderTest) -> None:
    """The prompt ends with the start of the stop string, and is echoed whole."""
    recite(router, 1)
    for stream in (False, True):
        body = {"prompt": "say xa", "stop": ["xab", "aabc"], "stream": stream, "echo": True}
        pieces, stop, _ = await http_text(router.http, "/v1/completions", body)
        assert ("".join(pieces), stop) == (f"say xa{ALPHABET}", None)


async def test_choices_stop_each_for_itself(router: RouterUnderTest) -> None:
    router.engine.script = lambda request, index: script("ab" * (index + 1) + "END" + "tail")
    body = {"prompt": "x", "n": 3, "stop": ["END"], "stream": True}
    response = await router.http.post("/v1/completions", json=body)
    events = [json.loads(e[6:]) for e in response.text.split("\n\n") if e and "[DONE]" not in e]
    texts = ["", "", ""]
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["ab", "abab", "ababab"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begin", range(4))
async def test_a_stop_string_across_the_hand_over(begin: int, stream: bool) -> None:
    """Its first letter may come from the prefill worker and its others from the decode worker."""
    prompt = [5, 9, 13, 17, 21, 25]
    answer = "".join(map(chr, expected(prompt, 12)))
    stop = answer[begin : begin + 3]
    begin = answer.index(stop)
    body = {"prompt": prompt, "stop": [stop], "temperature": 0, "max_tokens": 12, "stream": stream}
    async with (
        local_system(local_config()) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        pieces, found, _ = await http_text(client, "/v1/completions", body)
        assert ("".join(pieces), found) == (answer[:begin], stop)
        await system.settled()
