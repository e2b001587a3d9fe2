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


async def test_a_decode_worker_that_refuses_all_links_keeps_no_lease() -> None:
    """Most attempts have their first token from the prefill side all the same."""
    config = local_config(
        router={"max_attempts": 8}, cluster={"silence_s": FOREVER_S, "beat_s": 0.05}
    )
    refuses = Unreachable(LinkRefused("nobody listens"), times=1_000)
    async with local_system(config, connect=refuses) as system:
        assert await system.generate(PROMPT, max_tokens=3) == expected(PROMPT, 3)
        await system.settled()
        attempts = system.timelines[0].attempts
        assert attempts >= 3
        sent = system.workers["prefill-0"].role.endings
        assert sent["failed: refused"] >= attempts - 1
        assert set(sent) <= {"failed: refused", "aborted"}
        received = system.workers["decode-0"].role.endings
        # The last token needs no decode worker.
        assert dict(received) == {"released": attempts - 1}


async def test_a_sender_that_gives_up_while_its_link_is_down_frees_the_lease() -> None:
    """It cannot tell the receiver: the router does."""
    config = local_config(
        transfer={"progress_timeout_s": 0.1}, cluster={"silence_s": FOREVER_S, "beat_s": 0.05}
    )
    lost = Unreachable(LinkLost("no route"), times=4)
    async with local_system(config, connect=lost) as system:
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        await system.settled()
        sent = system.workers["prefill-0"].role.endings
        received = system.workers["decode-0"].role.endings
        assert sent["failed: timeout"] == received["released"] >= 1
        assert sent["complete"] == received["complete"] == 1
        assert set(sent) | set(received) == {"failed: timeout", "released", "complete"}
