"""Jobs reach compilers once each, and a compiler that dies takes one job with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from kernel_bench import FakeCompiler, compiled, norm_case

from kvferry.bench.kernel_cases.case import Case, Work
from kvferry.bench.kernel_compile import (
    Built,
    CompilerProcess,
    Failure,
    Job,
    Outcome,
    compile_cases,
    compiling_environment,
)
from kvferry.bench.kernel_table import compiled_by_case, compiled_rows
from kvferry.kernels.aot import Compiled
from kvferry.kernels.chips import CHIPS, Chip

H100, A100 = CHIPS["H100"], CHIPS["A100"]
JOB = Job("rms_norm", "tiny", 0, H100)

# Stands for a compiling process: what it does with each line that it reads.
PEER = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    {answer}
    sys.stdout.flush()
"""
ANSWER = json.dumps({"compiled": dict.fromkeys(Compiled.__slots__, 0)})


def process(answer: str) -> CompilerProcess:
    return CompilerProcess([sys.executable, "-c", PEER.format(answer=answer)])


def fine(job: Job) -> Outcome:
    return compiled()


def built(
    cases: Sequence[Case],
    chips: Sequence[Chip] = (H100,),
    outcome: Callable[[Job], Outcome] = fine,
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[list[Built], FakeCompiler]:
    compiler = FakeCompiler(outcome)
    found = compile_cases(cases, chips, processes=3, start=lambda: compiler, in_time=in_time)
    return found, compiler


def test_equal_launches_are_compiled_once_per_chip() -> None:
    cases = [norm_case("a"), norm_case("b"), norm_case("longer", size=1000)]
    found, compiler = built(cases, [H100, A100])
    assert len(found) == 6
    assert len(compiler.jobs) == 4
    assert {(job.case, job.chip.name) for job in compiler.jobs} == {
        ("a", "H100"),
        ("longer", "H100"),
        ("a", "A100"),
        ("longer", "A100"),
    }


def test_results_come_back_to_their_launches() -> None:
    def by_name(job: Job) -> Outcome:
        return compiled(registers=len(job.case))

    cases = [norm_case("x" * n, size=100 * n) for n in range(1, 12)]
    found, _ = built(cases, outcome=by_name)
    for each in found:
        assert isinstance(each.outcome, Compiled)
        assert each.outcome.registers == len(each.case.name)


def test_every_compiler_is_closed() -> None:
    _, compiler = built([norm_case(str(n), size=n) for n in range(2, 20)])
    assert compiler.closed == 3


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    compile_cases(
        [norm_case("a"), norm_case("b", size=1000)],
        [H100],
        processes=1,
        start=lambda: FakeCompiler(fine),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]


def test_no_case_is_no_work() -> None:
    assert built([])[0] == []


def test_what_there_is_no_time_for_is_a_failure() -> None:
    found, compiler = built([norm_case()], in_time=lambda: False)
    assert compiler.jobs == []
    assert found[0].outcome == Failure("out of time")


def test_a_case_that_makes_no_launch_is_a_failure_and_the_others_compile() -> None:
    def broken(device: torch.device, chip: Chip) -> Work:
        raise ValueError("head_dim: 7 is not possible")

    found, _ = built([norm_case("bad", make=broken), norm_case("good")])
    rows, wrong = compiled_rows(found)
    assert wrong == 1
    assert rows[0]["verdict"] == "makes no launch: head_dim: 7 is not possible"
    assert rows[1]["verdict"] == "ok"


def test_what_breaks_a_rule_is_counted_and_named() -> None:
    found, _ = built([norm_case("a"), norm_case("b", matrix=True, size=64)])
    rows, wrong = compiled_rows(found)
    assert wrong == 1
    assert [row["verdict"] for row in rows] == ["ok", "expected a matrix instruction, found none"]
    assert compiled_by_case(found)["rms_norm", "b"]["compiled"] == rows[1]["verdict"]


def test_what_the_compiler_says_is_the_verdict() -> None:
    found, _ = built([norm_case()], outcome=lambda job: Failure("PTXASError: no"))
    rows, wrong = compiled_rows(found)
    assert (wrong, rows[0]["verdict"]) == (1, "PTXASError: no")


def test_a_row_names_the_tiles_and_the_floors() -> None:
    (row,), _ = compiled_rows(built([norm_case()])[0])
    assert row["function"] == "rms_norm"
    assert "BLOCK=32" in str(row["constants"])
    assert row["arch"] == "sm_90"
    assert row["H200 µs"] == pytest.approx((1 << 20) / 4.8e12 * 1e6)


def test_a_process_answers_many_jobs() -> None:
    compiler = process(f"print({ANSWER!r})")
    try:
        assert compiler.compile(JOB) == Compiled(**json.loads(ANSWER)["compiled"])
        assert compiler.compile(JOB) == compiler.compile(JOB)
    finally:
        compiler.close()


def test_a_process_reports_what_does_not_compile() -> None:
    compiler = process('print(json.dumps({"error": job["case"] + " is bad"}))')
    try:
        assert compiler.compile(JOB) == Failure("tiny is bad")
    finally:
        compiler.close()


def test_a_process_that_dies_is_named_and_replaced() -> None:
    compiler = process(f"print({ANSWER!r}) if job['launch'] else sys.exit(7)")
    try:
        assert compiler.compile(JOB) == Failure("the compiling process ended with exit code 7")
        assert isinstance(compiler.compile(Job("rms_norm", "tiny", 1, H100)), Compiled)
    finally:
        compiler.close()


def test_a_process_that_never_started_can_be_closed() -> None:
    process("pass").close()


def test_compiling_processes_do_not_interpret() -> None:
    assert compiling_environment({"TRITON_INTERPRET": "1", "HOME": "x"}) == {"HOME": "x"}
