"""The two commands that run the whole system, as a shell runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

KVFERRY = Path(sys.executable).with_name("kvferry")
START_S = 180

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes whose environment holds ``mark``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return [command for command in found if command]


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark that every process of the test inherits; none may outlive it."""
    name = f"KVFERRY_TEST={tmp_path}"
    yield name
    deadline = time.monotonic() + 15
    while (left := processes_of(name)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def test_demo_answers_and_leaves_nothing(mark: str) -> None:
    done = subprocess.run(
        ["env", mark, KVFERRY, "demo"], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris" in done.stdout
    for station in ("queue", "prefill", "KV transfer", "GB/s", "exposed", "TTFT", "TPOT"):
        assert station in done.stdout


def test_serve_answers_both_apis_and_stops_on_ctrl_c(mark: str, tmp_path: Path) -> None:
    command = ["env", mark, KVFERRY, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (
        (tmp_path / "err").open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as server,
    ):
        assert server.stdout is not None
        ready = server.stdout.readline()
        match = re.fullmatch(
            r"kvferry is ready: smollm2-135m-instruct, gRPC (\S+), HTTP (http://\S+)\n", ready
        )
        assert match is not None, (tmp_path / "err").read_text()
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{match[2]}/completions", data)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["text"]
        asked = ["generate", "The capital of France is", "--target", match[1], "--max-tokens", "4"]
        done = subprocess.run([KVFERRY, *asked], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        shown = subprocess.run(
            [KVFERRY, "status", "--target", match[1]], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0
        assert "prefill-0" in shown.stdout
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    assert "stopping: requests in flight may finish" in (tmp_path / "err").read_text()
