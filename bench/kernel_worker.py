"""A process that compiles launches: a line of JSON in is a job, a line of JSON out its result.

Started by ``kernel_compile``, several side by side, in an environment without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from kvferry.bench.kernel_cases.registry import find_case
from kvferry.kernels.aot import compile_launch
from kvferry.kernels.chips import Chip


def result_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """``{"compiled": fields of Compiled}`` or ``{"error": one line}``."""
    chip = Chip(**job["chip"])
    try:
        work = find_case(job["kernel"], job["case"], chip).make(torch.device("meta"), chip)
        return {"compiled": asdict(compile_launch(work.launches[job["launch"]], chip))}
    # Whatever the compiler raises is this job's result; the next job may well compile.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[-1][:300]}"}


def main() -> None:
    """Answer until standard input ends."""
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as answers:
        # Compilers print; that must not end up between the answers.
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(result_of(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
