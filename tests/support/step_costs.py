"""What some work costs, counted instead of timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def instructions_of(work: Callable[[], object]) -> int:
    """Bytecode instructions that ``work`` takes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    with _no_collections():
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return count


def calls_of(work: Callable[[], object]) -> int:
    """Python and C functions that ``work`` calls."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with _no_collections():
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
    return count


@contextmanager
def _no_collections() -> Iterator[None]:
    """Whoever listens to them, as Hypothesis does, would be counted."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
