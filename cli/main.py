"""The ``kvferry`` command."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from kvferry.cli.bench import bench
from kvferry.cli.demo import demo
from kvferry.cli.generate import generate
from kvferry.cli.model import model_app
from kvferry.cli.serve import serve
from kvferry.cli.status import status
from kvferry.core.errors import KvferryError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Serve a language model from a prefill pool and a decode pool.",
)
app.command()(serve)
app.command()(generate)
app.command()(status)
app.add_typer(model_app, name="model")
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(bench)
app.command()(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvferry {version('kvferry')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line: 0 done, 1 an error of ours in one line on stderr, 2 wrong usage."""
    # Read when gRPC is imported, which the commands do: it would report every fork of Ray's.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app()
    except KvferryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
