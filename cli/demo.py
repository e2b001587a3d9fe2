"""``kvferry demo``: the whole system once, from nothing to nothing."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.markup import escape

from kvferry.cli.answer import read_answer
from kvferry.cli.console import Stages, stderr, stdout
from kvferry.cli.generate import show
from kvferry.cli.timeline import timeline_table
from kvferry.core.config import Config, load_config
from kvferry.core.sampling import SamplingParams

PROMPT = "The capital of France is"
# A base prompt has no natural end; a paragraph is a good one.
SAMPLING = SamplingParams(max_tokens=32, temperature=0.0, stop=("\n\n",))
# Free ports: the demo never meets another server.
OVERRIDES = {"router.grpc": "127.0.0.1:0", "router.http": "127.0.0.1:0"}


def demo(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = PROMPT,
    model: Annotated[str | None, typer.Option(help="Instead of the embedded default.")] = None,
) -> None:
    """Start one prefill and one decode worker, answer one prompt, stop everything."""
    overrides = OVERRIDES | ({} if model is None else {"model.path": model})
    asyncio.run(run_demo(load_config(None, overrides), prompt))


async def run_demo(config: Config, prompt: str) -> None:
    """Serve ``config`` for the length of one answer. Raises KvferryError."""
    from kvferry.client.client import KvferryClient
    from kvferry.cluster.system import System

    with Stages(stderr()) as stages:
        async with (
            System(config, report=stages) as system,
            KvferryClient(system.grpc_address) as client,
        ):
            stages.finish()
            stdout().print(f"\n[bold]{escape(prompt)}[/bold]", end="")
            answer = await read_answer(client.generate(prompt, SAMPLING), show)
            print("\n", flush=True)
            if answer.timeline is not None:
                stdout().print(timeline_table(answer.timeline))
            stages("stopping")
