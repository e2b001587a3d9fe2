"""The OpenAI API over real sockets, on the scripted engine."""

from __future__ import annotations

import httpx
from fake_engine import ANSWER, MODEL


async def test_completion_whole(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == ANSWER


async def test_completion_stream(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "Hi", "stream": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    print(response.text[-800:])
