"""B040: parts that name an address are refused before anything could be fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from router_under_test import RouterUnderTest, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")

URLS = [
    "http://169.254.169.254/latest/meta-data",
    "http://10.0.0.1/x.png",
    "http://[::1]/x.png",
    "http://[::ffff:169.254.169.254]/",
    "https://example.com/redirects-to-loopback",
    "file:///etc/passwd",
    "data:image/png;base64,iVBORw0KGgo=",
    "gopher://127.0.0.1:1/",
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def router() -> AsyncIterator[RouterUnderTest]:
    async with running_router() as router:
        yield router


@pytest.mark.parametrize("shape", ["object", "string"])
@pytest.mark.parametrize("kind", ["image_url", "input_image", "file", "input_audio", "video_url"])
@pytest.mark.parametrize("url", URLS)
async def test_refused_by_path(router: RouterUnderTest, url: str, kind: str, shape: str) -> None:
    part = {"type": kind, kind: {"url": url} if shape == "object" else url}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look"}, part]}]}
    response = await router.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1].type"
    assert router.engine.requests == []


async def test_a_data_url_of_many_megabytes(router: RouterUnderTest) -> None:
    raw = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:'
    response = await router.http.post(
        "/v1/chat/completions", content=raw + b"A" * (34 * 2**20) + b'"}]}]}'
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"
