"""A transfer that one side gives up ends the attempt on both sides at once: nobody waits for a
deadline.
"""

from __future__ import annotations

import pytest
from fake_engine_model import expected
from local_system import local_config, local_system

from kvferry.core.errors import LinkLost, LinkRefused
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.transport import Channel

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 70))
FOREVER_S = 600.0


class Unreachable:
    """A decode worker to which no link can be opened, the first so many times."""

    def __init__(self, error: LinkLost, times: int) -> None:
        self.error, self.times = error, times

    def __call__(self, endpoint: str, timeout_s: float) -> Channel:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return connect(endpoint, timeout_s)


@pytest.mark.parametrize(
    ("error", "times", "reason"),
    [(LinkRefused("nobody listens"), 2, "refused"), (LinkLost("no route"), 12, "timeout")],
    ids=["refused", "gives up"],
)
async def test_the_router_frees_the_lease_that_the_sender_cannot_reach(
    error: LinkLost, times: int, reason: str
) -> None:
    config = local_config(
        transfer={"progress_timeout_s": 0.3},
        router={"max_attempts": 8},
        cluster={"silence_s": FOREVER_S, "beat_s": 0.05},
    )
    async with local_system(config, connect=Unreachable(error, times=times)) as system:
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        await system.settled()
        sent = system.workers["prefill-0"].role.endings
        received = system.workers["decode-0"].role.endings
        assert sent[f"failed: {reason}"] == received["released"] >= 1
        assert sent["complete"] == received["complete"] == 1
        assert set(sent) | set(received) == {f"failed: {reason}", "released", "complete"}
