"""The steps of `make gpu`: each runs or says why it cannot, and a bare host can run them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kernel_bench import FakeClock

from kvferry.bench.gpu import STEPS, TOTAL_S, Found, Step, read_outcome, run_steps
from kvferry.bench.report import Better, Claim
from kvferry.core.errors import StartupError

OUTCOME = """<testsuites><testsuite tests="4">
<testcase classname="gpu.test_a" name="test_good"/>
<testcase classname="gpu.test_a" name="test_bad"><failure message="assert 1 == 2&#10;more"/>
</testcase>
<testcase classname="gpu.test_b" name="test_broken"><error message="fixture failed"/></testcase>
<testcase classname="gpu.test_b" name="test_left_out"><skipped message="no FP8"/></testcase>
</testsuite></testsuites>"""

# What a GPU host need not have. A module that is None cannot be imported.
ABSENT = ["ray", "grpc", "transformers", "tokenizers", "fastapi", "uvicorn", "safetensors", "gguf"]
ABSENT += ["xxhash", "msgpack", "jinja2", "huggingface_hub", "platformdirs", "prometheus_client"]
BARE = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
from kvferry.cli.main import main
sys.argv = ["kvferry", "bench", *sys.argv[1:]]
main()
"""


def claim(name: str) -> Claim:
    return Claim(id=name, value=1, better=Better.LOWER, goal=2)


def fails(limit_s: float) -> Found:
    raise StartupError("there is no such device")


def test_steps_run_in_order_and_what_cannot_is_named() -> None:
    def works(limit_s: float) -> Found:
        return Found(rows=[{"kernel": "x"}], claims=[claim("c")], facts={"chip": "H200"})

    steps = [Step("first", 10.0, fails), Step("second", 10.0, works)]
    report = run_steps(steps, FakeClock(step=0.5), {"quick": False})
    summaries = [(row["step"], row["outcome"]) for row in report.rows if "outcome" in row]
    assert summaries == [("first", "cannot: there is no such device"), ("second", "done")]
    assert {"step": "second", "kernel": "x"} in list(report.rows)
    claims = {c.id: c.value for c in report.claims}
    assert claims == {"c": 1, "gpu.steps_done": 1, "gpu.steps_failed": 0}
    assert report.options["second.chip"] == "H200"
    assert report.all_met


def test_a_host_that_can_do_nothing_fails() -> None:
    report = run_steps([Step("only", 10.0, fails)], FakeClock(), {})
    assert not report.all_met


def test_a_step_that_breaks_fails_and_the_next_one_runs() -> None:
    def breaks(limit_s: float) -> Found:
        raise RuntimeError("an illegal memory access was encountered")

    def works(limit_s: float) -> Found:
        return Found()

    report = run_steps([Step("a", 9.0, breaks), Step("b", 9.0, works)], FakeClock(), {})
    assert [row["outcome"] for row in report.rows] == [
        "failed: RuntimeError: an illegal memory access was encountered",
        "done",
    ]
    assert not report.all_met


def test_no_step_gets_more_than_is_left() -> None:
    clock = FakeClock()
    given: list[float] = []

    def slow(limit_s: float) -> Found:
        given.append(limit_s)
        clock.now += 300.0
        return Found()

    report = run_steps([Step(str(n), 240.0, slow) for n in range(3)], clock, {})
    assert given == [240.0, pytest.approx(TOTAL_S - 300.0)]
    assert report.rows[-1]["outcome"] == "cannot: no time is left"


def test_all_steps_fit_eight_minutes() -> None:
    assert TOTAL_S < 480
    assert STEPS[0].limit_s < 240


def test_failed_and_skipped_tests_are_rows() -> None:
    found = read_outcome(OUTCOME)
    assert [(row["test"], row["outcome"], row["notes"]) for row in found.rows] == [
        ("gpu.test_a.test_bad", "failed", "assert 1 == 2"),
        ("gpu.test_b.test_broken", "failed", "fixture failed"),
        ("gpu.test_b.test_left_out", "skipped", "no FP8"),
    ]
    (failed,) = found.claims
    assert (failed.value, failed.n, failed.met) == (2, 3, False)


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ('<testcase name="a"><skipped message="no CUDA device"/></testcase>', "no CUDA device"),
        ("", "there are none"),
    ],
)
def test_when_all_tests_are_skipped_the_step_cannot(inside: str, reason: str) -> None:
    with pytest.raises(StartupError, match=f"no test ran: {reason}"):
        read_outcome(f"<testsuite>{inside}</testsuite>")


IMPORT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
import kvferry.bench.gpu, kvferry.bench.kernels, kvferry.bench.kernel_worker
"""


def bare(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", BARE, *args], capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_nothing_of_make_gpu_needs_a_server() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kernels_run_where_there_is_no_ray_and_no_grpc() -> None:
    done = bare("kernels", "--kernel", "rms_norm")
    assert done.returncode == 0, done.stderr
    assert "rms_norm" in done.stdout


@pytest.mark.slow
def test_a_missing_library_is_one_line() -> None:
    done = bare("pd")
    assert done.returncode == 1
    assert "bench pd needs " in done.stderr
    assert "which is not installed: pip install" in done.stderr
    assert "Traceback" not in done.stderr
