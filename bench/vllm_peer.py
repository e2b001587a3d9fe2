"""vLLM as a peer. Runs alone, in the interpreter that has vLLM; nothing of kvferry is there.

Usage: PYTHON vllm_peer.py, with one JSON object on stdin:
``{"folder": str, "prefill_len": int, "prompt_len": int, "num_tokens": int, "batches": [int],
"repeats": int, "vocab_size": int}``. The last line of stdout is RESULT and one JSON object:
``{"name": str, "prefill": [tokens/s], "decode": {batch: [tokens/s]}}``.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from typing import Any

MARK = "RESULT "


def main() -> None:
    wanted = json.load(sys.stdin)
    # By name: this file is also imported where vLLM is not installed.
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=wanted["folder"],
        dtype="float32",
        max_model_len=max(wanted["prefill_len"], wanted["prompt_len"] + wanted["num_tokens"]) + 1,
        max_num_seqs=max(wanted["batches"]),
        enable_prefix_caching=False,
        # Of the host's memory, on a CPU: others have some of it too.
        gpu_memory_utilization=0.4,
        disable_log_stats=True,
    )
    print(MARK + json.dumps(measure(vllm, engine, wanted)), flush=True)


def measure(vllm: Any, engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Rates by the same definitions as those of the other engines."""
    draw = random.Random(0)

    def seconds(count: int, length: int, num_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [draw.randrange(wanted["vocab_size"]) for _ in range(length)]}
            for _ in range(count)
        ]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    seconds(1, 8, 2)
    length, prompt_len, num_tokens = (
        wanted[name] for name in ("prefill_len", "prompt_len", "num_tokens")
    )
    repeats = range(wanted["repeats"])
    decode = {}
    for batch in wanted["batches"]:
        seconds(batch, prompt_len, 2)
        decode[batch] = [
            batch
            * (num_tokens - 1)
            / (seconds(batch, prompt_len, num_tokens) - seconds(batch, prompt_len, 1))
            for _ in repeats
        ]
    return {
        "name": f"vLLM {vllm.__version__}",
        "prefill": [length / seconds(1, length, 1) for _ in repeats],
        "decode": decode,
    }


if __name__ == "__main__":
    main()
