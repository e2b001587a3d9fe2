"""Peers that run as programs of their own: vLLM in its interpreter, llama.cpp's batched bench."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvferry.bench import vllm_peer
from kvferry.bench.throughput import Rates, Sizes
from kvferry.core.errors import StartupError

PEER_TIMEOUT_S = 1800


def vllm_rates(python: str, folder: Path, vocab_size: int, sizes: Sizes, threads: int) -> Rates:
    """Run vLLM in the interpreter that has it. Raises StartupError with its last words."""
    wanted = dataclasses.asdict(sizes) | {"folder": str(folder), "vocab_size": vocab_size}
    # -P: the files beside the script are not modules of that interpreter, whatever their names.
    output = _run([python, "-P", str(Path(vllm_peer.__file__))], threads, json.dumps(wanted))
    return parse_vllm(output)


def parse_vllm(output: str) -> Rates:
    """What ``vllm_peer`` printed, among whatever else its libraries say. Raises StartupError."""
    for line in reversed(output.splitlines()):
        if line.startswith(vllm_peer.MARK):
            found = json.loads(line.removeprefix(vllm_peer.MARK))
            decode = {int(batch): rates for batch, rates in found["decode"].items()}
            return Rates(found["name"], found["prefill"], decode)
    raise StartupError("vLLM printed no result")


def llama_rates(binary: str, gguf: Path, sizes: Sizes, threads: int) -> Rates:
    """Run ``llama-batched-bench`` with float32 KV. Raises StartupError with its last words."""
    rates = Rates("llama.cpp")
    longest = max(sizes.batches) * (sizes.prompt_len + sizes.num_tokens)
    context = max(longest, sizes.prefill_len + 1)
    common = [binary, "-m", str(gguf), "-c", str(context), "-ub", "512"]
    common += ["-t", str(threads), "-tb", str(threads), "-ctk", "f32", "-ctv", "f32"]
    common += ["--output-format", "jsonl"]
    batches = ",".join(map(str, sizes.batches))
    for _ in range(sizes.repeats):
        prefill = ["-npp", str(sizes.prefill_len), "-ntg", "1", "-npl", "1"]
        # It counts a token per step from the first: one less makes the steps those of the others.
        decode = ["-npp", str(sizes.prompt_len), "-ntg", str(sizes.num_tokens - 1)]
        rates.prefill += [run["speed_pp"] for run in parse_llama(_run(common + prefill, threads))]
        for run in parse_llama(_run([*common, *decode, "-npl", batches], threads)):
            rates.decode.setdefault(run["pl"], []).append(run["speed_tg"])
    return rates


def parse_llama(output: str) -> list[dict[str, Any]]:
    """The measurements among the log lines: one JSON object per line. Raises StartupError."""
    found = []
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        try:
            run = json.loads(line)
        except ValueError:
            continue
        if {"pl", "speed_pp", "speed_tg"} <= run.keys():
            found.append(run)
    if not found:
        raise StartupError("llama-batched-bench printed no measurement")
    return found


def f32_gguf(binary: str, source: Path, folder: Path) -> Path:
    """A float32 copy of a GGUF file, made by the ``llama-quantize`` that lies beside ``binary``.

    Raises StartupError.
    """
    target = folder / f"{source.stem}-F32.gguf"
    quantize = Path(binary).with_name("llama-quantize")
    _run([str(quantize), "--allow-requantize", str(source), str(target), "F32"], threads=1)
    return target


def _run(command: list[str], threads: int, stdin: str = "") -> str:
    """Standard output of a program that gets ``threads`` threads. Raises StartupError."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PEER_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"{command[0]} could not be run: {error}") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise StartupError(f"{command[0]} failed: {words[-1]}")
    print(f"{Path(command[0]).name}: done", file=sys.stderr)
    return done.stdout
