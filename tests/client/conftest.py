"""A router on the scripted engine, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fake_engine import FakeEngine
from router_under_test import RouterUnderTest, running_router

from kvferry.client.client import KvferryClient


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with running_router() as router:
        yield router


@pytest.fixture
def engine(router: RouterUnderTest) -> FakeEngine:
    return router.engine


@pytest.fixture
def target(router: RouterUnderTest) -> str:
    return router.grpc_target


@pytest.fixture
async def client(target: str) -> AsyncIterator[KvferryClient]:
    async with KvferryClient(target) as client:
        yield client
