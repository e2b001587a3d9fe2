"""A router of both APIs over real sockets, on the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fake_engine import FakeEngine
from router_under_test import RouterUnderTest, fake_intake, running_router

from kvferry.router.intake import Intake


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_router() -> AsyncIterator[RouterUnderTest]:
    """One router for all tests of a module, which must run in the module's loop."""
    async with running_router() as router:
        yield router


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with running_router() as router:
        yield router


@pytest.fixture
def engine() -> FakeEngine:
    """An engine without a router around it."""
    return FakeEngine()


@pytest.fixture
def intake() -> Intake:
    return fake_intake()
