"""Write the roofline of the kernel bench into docs/kernels.md, between its markers.

``python docs/kernel_tables.py [FILE]``; FILE is written in place of docs/kernels.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvferry.bench.kernel_cases.registry import all_cases
from kvferry.bench.kernel_table import markdown, roofline_rows

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- roofline: written by `make docs` from bench/kernel_cases -->"
END = "<!-- end of roofline -->"


def render(page: str) -> str:
    """``page`` with a fresh table of the cases that have goals. Raises ValueError when a marker is
    missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page lacks a marker of its roofline")
    promised = [case for case in all_cases() if case.goal is not None]
    rows = [
        {**row, "goal": f"{case.goal:.0%} of {case.limit.value}"}
        for case, row in zip(promised, roofline_rows(promised), strict=True)
    ]
    return head + BEGIN + "\n\n" + "\n".join(markdown(rows)) + "\n\n" + END + tail


if __name__ == "__main__":
    source = HERE / "kernels.md"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else source
    target.write_text(render(source.read_text(encoding="utf-8")), encoding="utf-8")
