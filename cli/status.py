"""``kvferry status``: pools, workers, blocks by state and load of a running server."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from kvferry.cli.console import stdout
from kvferry.cli.generate import DEFAULT_TARGET, Target
from kvferry.cli.links import link_table
from kvferry.proto import kvferry_pb2 as pb

BLOCK_STATES = ("free", "reserved", "in_use", "cached", "fenced")


def status(
    target: Target = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the pools of a running server. Exits with 1 when it is not ready."""
    answer = asyncio.run(ask_status(target))
    if as_json:
        print(json.dumps(status_json(answer)))
    else:
        print_status(answer)
    if not answer.ready:
        raise typer.Exit(1)


async def ask_status(target: str) -> pb.StatusResponse:
    """What the server at ``target`` says of itself. Raises Unavailable."""
    from kvferry.client.client import KvferryClient

    async with KvferryClient(target) as client:
        return await client.status()


def status_json(answer: pb.StatusResponse) -> dict[str, object]:
    """The message as plain values, zeros included."""
    return MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_status(answer: pb.StatusResponse) -> None:
    console = stdout()
    state = "ready" if answer.ready else f"not ready: {answer.reason}"
    line = f"{answer.model}: {state}; {answer.queued} queued, {answer.running} running"
    console.print(line, markup=False)
    console.print(status_table(answer))
    if answer.links:
        console.print(link_table(answer.links))
    for worker in answer.workers:
        if worker.reason:
            console.print(f"{worker.worker_id}: {worker.reason}", markup=False)


def status_table(answer: pb.StatusResponse) -> Table:
    """One row per worker, prefill first. Fits a terminal of 80 columns."""
    table = Table("worker", "role", "state")
    table.columns[0].no_wrap = True
    for name in ("running", "waiting", "steps"):
        table.add_column(name, justify="right")
    table.add_column("blocks")
    for worker in sorted(answer.workers, key=lambda w: (w.role != "prefill", w.worker_id)):
        load = (f"{number:,}" for number in (worker.running, worker.waiting, worker.steps))
        table.add_row(worker.worker_id, worker.role, worker.state, *load, blocks_text(worker))
    return table


def blocks_text(worker: pb.WorkerStatus) -> str:
    """``720 free, 8 cached, of 16 tokens``: the states that hold any block."""
    counts = {name: getattr(worker.blocks, name) for name in BLOCK_STATES}
    held = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return f"{', '.join(held) or 'none'}, of {worker.block_size} tokens"
