"""The commands as a shell runs them, against a router with canned answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvferry.cli.bench import benches
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc

pytestmark = pytest.mark.slow

KVFERRY = Path(sys.executable).with_name("kvferry")


class CannedRouter(kvferry_pb2_grpc.KvferryServicer):
    """Answers " Paris." to every prompt that is not empty, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []
        self.ready = True
        self.cancelled = threading.Event()

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request)
        if not request.text:
            context.set_trailing_metadata((("kvferry-field", "prompt"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt: must not be empty")
        yield pb.GenerateResponse(text=" Par", token_ids=[1])
        yield pb.GenerateResponse(
            text="is.",
            token_ids=[2, 3],
            finish_reason="stop",
            timeline=pb.Timeline(output_tokens=3, decode_s=0.2, prefill_worker="prefill-0"),
            usage=pb.Usage(prompt_tokens=5, completion_tokens=3),
        )

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        reason = "" if self.ready else "decode-0 is lost"
        worker = pb.WorkerStatus(worker_id="decode-0", role="decode", state="ready")
        return pb.StatusResponse(model="tiny", ready=self.ready, reason=reason, workers=[worker])


@pytest.fixture
def router() -> Iterator[tuple[CannedRouter, str]]:
    service = CannedRouter()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        kvferry_pb2_grpc.add_KvferryServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield service, f"127.0.0.1:{port}"
        server.stop(0).wait()


def kvferry(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVFERRY, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
    )


def test_generate_streams_the_answer_and_shows_the_time(router: tuple[CannedRouter, str]) -> None:
    service, target = router
    done = kvferry(
        "generate", "The capital of France is", "--target", target, "--max-tokens", "7",
        "--temperature", "0", "--top-p", "0.9", "--seed", "5",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, " Paris.\n"), done.stderr
    assert "where the time went" in done.stderr
    (asked,) = service.asked
    sampling = asked.sampling
    assert asked.text == "The capital of France is"
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.0, 5)
    assert sampling.top_p == pytest.approx(0.9)


def test_generate_json_is_one_object(router: tuple[CannedRouter, str]) -> None:
    done = kvferry("generate", "-", "--json", "--target", router[1], stdin="from a pipe")
    answer = json.loads(done.stdout)
    assert answer["text"] == " Paris."
    assert answer["token_ids"] == [1, 2, 3]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    assert answer["timeline"]["output_tokens"] == 3
    assert router[0].asked[0].text == "from a pipe"


def test_a_refused_request_is_one_line(router: tuple[CannedRouter, str]) -> None:
    done = kvferry("generate", "", "--target", router[1])
    assert (done.returncode, done.stderr) == (1, "kvferry: prompt: must not be empty\n")


def test_a_wrong_option_value_names_its_field() -> None:
    done = kvferry("generate", "x", "--temperature", "-1")
    assert done.returncode == 1
    assert done.stderr.startswith("kvferry: temperature: ")
    assert done.stderr.count("\n") == 1


def test_no_server_is_one_line() -> None:
    done = kvferry("status", "--target", "127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("kvferry: 127.0.0.1:9: ")
    assert "Traceback" not in done.stderr


def test_status_as_table_and_json(router: tuple[CannedRouter, str]) -> None:
    service, target = router
    assert "tiny: ready" in kvferry("status", "--target", target).stdout
    service.ready = False
    done = kvferry("status", "--json", "--target", target)
    assert done.returncode == 1
    assert json.loads(done.stdout)["reason"] == "decode-0 is lost"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "absent.yaml"], "kvferry: absent.yaml: cannot be read"),
        (["serve", "--decode", "0"], "kvferry: decode.workers: must be at least 1"),
        (["serve", "--prefill", "0"], "kvferry: prefill.workers: a decode pool needs"),
        (["serve", "--kv-memory", "lots"], "kvferry: prefill.kv_memory: 'lots' is not a size"),
        (["serve", "--grpc", "50051"], "kvferry: router.grpc: '50051' is not an address"),
        (["serve", "--dtype", "int3"], "kvferry: model.dtype: "),
        (["serve", "--prefill-tp", "0"], "kvferry: prefill.tp: "),
        (["model", "pull", "x", "--dtype", "int3"], "kvferry: model.dtype: "),
    ],
)
def test_a_wrong_configuration_is_one_line(arguments: list[str], says: str) -> None:
    done = kvferry(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["serv"],
        ["generate"],
        ["serve", "--prefill", "two"],
        ["bench", "nonsense"],
        ["bench", "kernels", "--json", "absent/report.json"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    done = kvferry(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_is_quick_because_nothing_heavy_is_loaded() -> None:
    script = (
        "import sys, kvferry.cli.main\n"
        "heavy = ('torch', 'ray', 'transformers', 'fastapi', 'grpc')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_help_and_version() -> None:
    assert all(name in kvferry("--help").stdout for name in ("serve", "generate", "model"))
    assert "CONFIG.yaml" in kvferry("serve", "--help").stdout
    assert kvferry("--version").stdout.startswith("kvferry 0.")


def test_bench_lists_what_there_is() -> None:
    done = kvferry("bench")
    assert done.returncode == 0
    assert all(name in done.stdout for name in benches())
