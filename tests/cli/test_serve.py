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


@pytest.fixture
def server(mark: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``kvferry serve`` on free ports; what it says on stderr is in ``err``."""
    command = ["env", mark, KVFERRY, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (
        (tmp_path / "err").open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        yield process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def complete(url: str) -> str:
    """The answer of the HTTP API to the prompt of the demo."""
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def test_serve_answers_both_apis_and_stops_on_ctrl_c(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert server.stdout is not None
    ready = server.stdout.readline()
    pattern = r"kvferry is ready: smollm2-135m-instruct, gRPC (\S+), HTTP (http://\S+)\n"
    match = re.fullmatch(pattern, ready)
    assert match is not None, (tmp_path / "err").read_text()
    assert "Paris" in complete(match[2])
    for arguments, says in (
        (
            ["generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0"],
            "Paris",
        ),
        (["status"], "prefill-0"),
    ):
        done = subprocess.run(
            [KVFERRY, *arguments, "--target", match[1]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert says in done.stdout
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=60) == 0
    said = (tmp_path / "err").read_text()
    assert "stopping: requests in flight may finish" in said
    assert "fork_posix" not in said
