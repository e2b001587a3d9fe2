"""How the commands speak: stages, errors, the two streams."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

# Tables in a file or a pipe are not cut to the width of a terminal that is not there.
FILE_WIDTH = 160


def stdout() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def stderr() -> Console:
    width = None if sys.stderr.isatty() else FILE_WIDTH
    return Console(stderr=True, highlight=False, width=width)


class Stages:
    """Prints one line per stage of a long job; on a terminal the stage under way spins.

    Call it with the name of each stage as it starts. A stage is done when the next one starts,
    or when the ``with`` block ends without an error.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._stage = ""
        self._began = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish("✓" if error is None else "✗")

    def __call__(self, stage: str) -> None:
        self.finish()
        self._stage, self._began = stage, time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(stage)
            self._status.start()

    def finish(self, mark: str = "✓") -> None:
        """The stage under way is over, and no other one starts."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._stage:
            took = time.monotonic() - self._began
            self._console.print(
                f"{mark} {self._stage} ({took:.1f} s)", markup=False, soft_wrap=True
            )
            self._stage = ""
