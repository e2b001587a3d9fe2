"""``kvferry generate``: one prompt to a running server, the answer on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer

from kvferry.cli.answer import read_answer
from kvferry.cli.console import stderr
from kvferry.cli.timeline import timeline_table
from kvferry.core.request import Usage
from kvferry.core.sampling import SamplingParams, parse_sampling

DEFAULT_TARGET = "127.0.0.1:50051"
Target = Annotated[
    str, typer.Option("--target", metavar="HOST:PORT", help="gRPC address of the router.")
]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    target: Target = DEFAULT_TARGET,
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus: probability mass kept.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, with token ids and timeline.")
    ] = False,
) -> None:
    """Send PROMPT to a running server and stream its answer."""
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = parse_sampling({name: value for name, value in options.items() if value is not None})
    text = sys.stdin.read() if prompt == "-" else prompt
    asyncio.run(ask(text, target, sampling, as_json=as_json))


async def ask(prompt: str, target: str, sampling: SamplingParams, *, as_json: bool) -> None:
    """Stream one answer to stdout; the timeline goes to stderr."""
    from kvferry.client.client import KvferryClient

    async with KvferryClient(target) as client:
        usage = Usage()
        deltas = client.generate(prompt, sampling, usage=usage)
        answer = await read_answer(deltas, show) if not as_json else await read_answer(deltas)
    if as_json:
        answer.usage = usage
        print(json.dumps(answer.to_json()))
        return
    print(flush=True)
    if answer.timeline is not None:
        stderr().print(timeline_table(answer.timeline))


def show(text: str) -> None:
    print(text, end="", flush=True)
