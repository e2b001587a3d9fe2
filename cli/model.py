"""``kvferry model``: fetch models before they are served."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import Stages, stderr
from kvferry.core.config import EMBEDDED_MODEL, load_config

model_app = typer.Typer(no_args_is_help=True, help="Fetch models before they are served.")


@model_app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help=f"{EMBEDDED_MODEL}, a hub id, a folder or a GGUF file.")
    ] = EMBEDDED_MODEL,
    dtype: Annotated[str, typer.Option(help="Element type that it will be served in.")] = "float32",
) -> None:
    """Download NAME, convert it where needed, check it, and print its folder."""
    config = load_config(None, {"model.path": name, "model.dtype": dtype})
    from kvferry.models.load import prepare

    with Stages(stderr()) as stages:
        folder = prepare(config.model, progress=stages)
    print(folder)
