"""The one builder: configuration in, a serving system out.

    model ─▶ APIs (live, not ready) ─▶ Ray ─▶ workers, side by side ─▶ sessions ─▶ ready

Leaving the context undoes it backwards: drain the APIs, close the sessions, stop the workers, stop
Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ray.util.placement_group import PlacementGroup

from kvferry.cluster.runtime import ray_runtime
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.worker_handle import WorkerHandle
from kvferry.core.config import Config
from kvferry.core.errors import ConfigError, StartupError
from kvferry.models.load import prepare
from kvferry.models.spec import read_spec
from kvferry.models.tokenizer import Tokenizer
from kvferry.proto.kvferry_pb2 import LinkStatus
from kvferry.router.channel import GrpcDial
from kvferry.router.router import Router, WorkerAddress
from kvferry.router.server import ApiServer
from kvferry.router.workers import Role


class System:
    """Router, prefill pool and decode pool. ``report`` is told each stage of start-up and
    repair; ``measured`` once what the ways of KV between the workers carry, some time after
    requests are served.
    """

    def __init__(
        self,
        config: Config,
        report: Callable[[str], None],
        measured: Callable[[Sequence[LinkStatus]], None] = lambda links: None,
    ) -> None:
        self.grpc_address = ""
        self.http_address = ""
        self._config = config
        self._report = report
        self._measured = measured
        self._secret = secrets.token_hex(32)
        self._stack = contextlib.AsyncExitStack()
        self._folder = Path()
        self._vocab_size = 0
        self._supervising: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Raises StartupError; then nothing is left running."""
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Raises StartupError when a worker died and could not be brought back."""
        assert self._supervising is not None, "not started"
        await asyncio.shield(self._supervising)

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        config = self._config
        if config.transfer.transport == "loopback":
            raise ConfigError(
                "transfer.transport", "loopback needs both pools in one process; choose shm or tcp"
            )
        self._folder = await asyncio.to_thread(prepare, config.model, self._report)
        tokenizer = await asyncio.to_thread(Tokenizer, self._folder)
        spec = read_spec(self._folder, config.model.max_model_len)
        self._vocab_size = min(tokenizer.vocab_size, spec.vocab_size)
        router = Router(config, GrpcDial(self._secret, config.cluster.silence_s))
        stack.push_async_callback(router.close)
        apis = ApiServer(config, router, tokenizer, spec.max_model_len, spec.vocab_size)
        stack.push_async_callback(apis.stop)
        self.grpc_address, self.http_address = await apis.start()
        self._report("starting Ray")
        group = await stack.enter_async_context(ray_runtime(config))
        workers = self._handles(group)
        stack.push_async_callback(self._stop_all, workers)
        self._report(f"loading {config.model.name} on {', '.join(w.worker_id for w in workers)}")
        await self._start_all(workers)
        # Again, and left before the workers are: requests under way may finish, sessions end in
        # peace.
        stack.push_async_callback(router.close)
        stack.push_async_callback(apis.stop)
        self._report("connecting")
        router.connect([WorkerAddress(worker.role, worker.address) for worker in workers])
        await self._connected(router)
        supervisor = Supervisor(workers, self._restart, router.replace, self._report)
        self._supervising = asyncio.create_task(supervisor.run())
        stack.push_async_callback(_cancelled, self._supervising)
        if config.transfer.probe:
            measuring = asyncio.create_task(self._tell_links(router))
            stack.push_async_callback(_cancelled, measuring)

    def _handles(self, group: PlacementGroup) -> list[WorkerHandle]:
        config = self._config
        decode_role = Role(config.decode.role)
        roles = [Role.PREFILL] * config.prefill.workers + [decode_role] * config.decode.workers
        counts: dict[Role, int] = {}
        handles = []
        for bundle, role in enumerate(roles):
            number = counts[role] = counts.get(role, -1) + 1
            handles.append(WorkerHandle(role, f"{role}-{number}", bundle, group, config))
        return handles

    async def _start_all(self, workers: list[WorkerHandle]) -> None:
        results = await asyncio.gather(
            *(self._restart(worker) for worker in workers), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _restart(self, worker: WorkerHandle) -> None:
        await worker.start(self._folder, self._vocab_size, self._secret)

    async def _connected(self, router: Router) -> None:
        try:
            await router.wait_ready(self._config.cluster.start_timeout_s)
        except TimeoutError as error:
            raise StartupError(
                f"the workers are up, but no request can be served: {error}"
            ) from None

    async def _tell_links(self, router: Router) -> None:
        links = await router.wait_links(self._config.cluster.start_timeout_s)
        if links:
            self._measured(links)

    async def _stop_all(self, workers: list[WorkerHandle]) -> None:
        limit = self._config.cluster.stop_timeout_s
        await asyncio.gather(*(worker.stop(limit) for worker in workers))


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
