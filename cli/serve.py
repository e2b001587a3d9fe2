"""``kvferry serve``: configuration in, a running system and a ready line out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.cli.console import Stages, stderr
from kvferry.cli.lifetime import Serving, serve_until_stopped
from kvferry.cli.links import link_table
from kvferry.core.config import Config, load_config
from kvferry.proto.kvferry_pb2 import LinkStatus

File = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.yaml", help="Options override its values.")
]
POOLS = "Workers"
MODEL = "Model"
APIS = "Addresses"


def serve(
    config: File = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face folder, hub id or GGUF file.", rich_help_panel=MODEL),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for.", rich_help_panel=MODEL)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float64, float32, bfloat16 or float16.", rich_help_panel=MODEL),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Element type of the KV cache.", rich_help_panel=MODEL)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context limit in tokens.", rich_help_panel=MODEL)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Where to compute.", rich_help_panel=POOLS),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(metavar="N", help="Prefill workers.", rich_help_panel=POOLS)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(metavar="N", help="Decode workers.", rich_help_panel=POOLS)
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="decode|both",
            help="both: the decode workers prefill too, and there is no prefill pool.",
            rich_help_panel=POOLS,
        ),
    ] = None,
    prefill_tp: Annotated[
        int | None,
        typer.Option(help="Tensor-parallel degree of a prefill worker.", rich_help_panel=POOLS),
    ] = None,
    decode_tp: Annotated[
        int | None,
        typer.Option(help="Tensor-parallel degree of a decode worker.", rich_help_panel=POOLS),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV block, both pools.", rich_help_panel=POOLS)
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="KV cache per worker, such as 512MiB.", rich_help_panel=POOLS
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="gRPC API; port 0: any.", rich_help_panel=APIS),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="OpenAI API; port 0: any.", rich_help_panel=APIS),
    ] = None,
) -> None:
    """Start the router, the prefill pool and the decode pool, and serve until Ctrl-C.

    Every value stands in one YAML file; docs/configuration.md lists them. Ctrl-C (or SIGTERM)
    lets requests in flight finish, a second one stops at once.
    """
    values: dict[str, Any] = {
        "model.path": model,
        "model.served_name": served_model_name,
        "model.dtype": dtype,
        "model.kv_dtype": kv_dtype,
        "model.max_model_len": max_model_len,
        "cluster.device": device,
        "prefill.workers": 0 if role == "both" and prefill is None else prefill,
        "decode.workers": decode,
        "decode.role": role,
        "prefill.tp": prefill_tp,
        "decode.tp": decode_tp,
        "prefill.block_size": block_size,
        "decode.block_size": block_size,
        "prefill.kv_memory": kv_memory,
        "decode.kv_memory": kv_memory,
        "router.grpc": grpc,
        "router.http": http,
    }
    overrides = {key: value for key, value in values.items() if value is not None}
    asyncio.run(run_server(load_config(config, overrides)))


async def run_server(config: Config) -> None:
    """Run the system that ``config`` describes until it is told to stop."""
    from kvferry.cluster.system import System

    with Stages(stderr()) as stages:

        def ready(serving: Serving) -> None:
            stages.finish()
            print(ready_line(config, serving), flush=True)

        def measured(links: Sequence[LinkStatus]) -> None:
            stderr().print(link_table(links))

        await serve_until_stopped(System(config, stages, measured), ready, stages)


def ready_line(config: Config, serving: Serving) -> str:
    return (
        f"kvferry is ready: {config.model.name}, "
        f"gRPC {serving.grpc_address}, HTTP http://{serving.http_address}/v1"
    )
