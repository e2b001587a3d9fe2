"""`kvferry bench kernels` as a command: its modes, its mistakes, its whole run on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_bench import FakeClock, FakeTimer, bench, norm_case

from kvferry.bench import kernels
from kvferry.bench.kernel_cases.registry import (
    all_cases,
    chosen_cases,
    find_case,
    variants,
)
from kvferry.bench.kernel_device import OURS
from kvferry.bench.kernel_table import ROOFLINE_CHIPS
from kvferry.core.errors import StartupError
from kvferry.kernels.chips import CHIPS

H100 = CHIPS["H100"]


def test_the_roofline_has_a_floor_for_every_case_and_chip() -> None:
    report = kernels.run([])
    assert len(report.rows) == len(all_cases())
    for chip in ROOFLINE_CHIPS:
        assert all(float(row[f"{chip.name} µs"] or 0) > 0 for row in report.rows)
    assert {chip.name for chip in ROOFLINE_CHIPS} == {"H100", "H200", "B200", "RTX 5060"}


def test_one_kernel_or_the_subset_of_ci_can_be_chosen() -> None:
    assert {row["kernel"] for row in kernels.run(["--kernel", "rms_norm"]).rows} == {"rms_norm"}
    in_ci = kernels.run(["--ci"]).rows
    assert 0 < len(in_ci) < len(all_cases())


def test_a_page_can_be_written(tmp_path: Path) -> None:
    kernels.run(["--kernel", "rms_norm", "--markdown", str(tmp_path / "page.md")])
    assert "| rms_norm |" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_chips_may_have_spaces_and_are_taken_once() -> None:
    args = ["--compile-only", "--kernel", "rms_norm", "--ci", "--processes", "1"]
    report = kernels.run([*args, "--chip", "H100, RTX 5060 ,H100"])
    rows = [(row["case"], row["arch"]) for row in report.rows]
    assert len(set(rows)) == len(rows)
    assert {arch for _, arch in rows} == {"sm_90", "sm_120"}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--kernel", "nothing"], "--kernel: 'nothing' is none of: "),
        (["--chip", "H100, P4"], "--chip: 'P4' is none of: "),
        (["--tune"], "--tune times on a device"),
        (["--device", "cpu"], "argument --device: invalid choice: 'cpu'"),
        (["--device", "cuda", "--compile-only"], "argument --compile-only: not allowed with"),
        (["--budget", "0"], "argument --budget: '0' is no number of seconds above 0"),
        (["--budget", "nan"], "argument --budget: 'nan' is no number of seconds above 0"),
        (["--budget", "long"], "argument --budget: 'long' is no number of seconds above 0"),
        (["--processes", "0"], "argument --processes: '0' is no whole number from 1 on"),
        (["--markdown", "absent/page.md"], "argument --markdown: there is no folder absent"),
        (["--markdown", "/"], "argument --markdown: / is a folder"),
    ],
)
def test_mistakes_are_usage_errors(
    args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        kernels.run(args)
    assert error.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_device_mode_says_so() -> None:
    with pytest.raises(StartupError, match="finds no CUDA device"):
        kernels.run(["--device", "cuda"])


@pytest.mark.slow
def test_a_whole_run_on_a_device(tmp_path: Path) -> None:
    """Compiled for real, checked in the interpreter, timed by a fake clock."""
    case = find_case("rms_norm", "add, 64 x 4096 bf16", H100)
    report = kernels.device_report(
        [case], bench(FakeTimer(lambda call: 1e-6), FakeClock(step=0.01)), 1, 100.0, {}
    )
    report.write(tmp_path / "kernels.json")
    written = json.loads((tmp_path / "kernels.json").read_text())
    (row,) = written["rows"]
    assert row["µs"] == pytest.approx(1.0)
    assert row["error"] <= row["tolerance"]
    assert row["registers"] > 0
    assert row["compiled"] == "ok"
    ids = {claim["id"]: claim["value"] for claim in written["claims"]}
    assert ids["kernels.compile_violations"] == ids["kernels.wrong"] == 0
    assert "kernels.rms_norm.add_64_x_4096_bf16.copy_share" in ids
    assert written["options"]["chip"] == "interpreter"


@pytest.mark.slow
def test_a_tuning_run_ranks_all_tiles_and_promises_nothing() -> None:
    plain = norm_case("a")
    tuned = norm_case("a", candidates=lambda chip: {"x": plain.make, "y": plain.make})
    report = kernels.tuning_report(
        [tuned, norm_case("untuned")], bench(clock=FakeClock(step=10.0)), 1, 50.0, {}
    )
    assert report.claims == ()
    assert {row["case"] for row in report.rows} == {"a", "a @ x", "a @ y"}


def test_cases_are_found_by_their_names() -> None:
    names = [(case.kernel, case.name) for case in all_cases()]
    assert len(set(names)) == len(names)
    for kernel, name in names:
        assert find_case(kernel, name, H100).name == name
    with pytest.raises(LookupError, match="no case"):
        find_case("rms_norm", "nothing", H100)


def test_variants_are_found_by_the_names_they_are_given() -> None:
    tuned = {case.kernel: case for case in all_cases() if case.candidates is not None}
    assert {"flash_attention", "flash_decoding"} <= set(tuned)
    for case in tuned.values():
        names = [variant.name for variant in variants(case, H100)]
        assert len(set(names)) == len(names) > 1
        assert names[0] == case.name
        for name in (names[1], names[-1]):
            assert find_case(case.kernel, name, H100).name == name


def test_every_case_makes_its_launches_for_every_chip_without_a_device() -> None:
    meta = torch.device("meta")
    for number, case in enumerate(all_cases()):
        # All chips in turn: the cases of a kernel have most of their path in common.
        chip = list(CHIPS.values())[number % len(CHIPS)]
        work = case.make(meta, chip)
        assert work.launches, case.name
        assert work.outputs, case.name


def test_every_case_has_a_floor_a_tolerance_and_possible_goals() -> None:
    for case in all_cases():
        assert case.nbytes > 0, case.name
        assert case.flops > 0 or case.limit.value == "copy", case.name
        # One step of FP8 E4M3 is an eighth of the value.
        assert 0 <= case.tolerance <= 0.125, case.name
        assert case.goal is None or 0 < case.goal <= 1, case.name
        other = case.not_slower_than
        assert other is None or find_case(case.kernel, other, H100).name == other
        assert " @ " not in case.name


def test_every_kernel_has_cases_in_ci() -> None:
    assert {case.kernel for case in chosen_cases(ci_only=True)} == {
        case.kernel for case in all_cases()
    }


def test_a_timed_case_is_ours() -> None:
    assert OURS == "kvferry"


@pytest.mark.slow
def test_without_triton_the_command_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; from kvferry.cli.main import main; "
        "sys.argv = ['kvferry', 'bench', 'kernels', '--compile-only']; main()"
    )
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "bench kernels needs triton, which is not installed: pip install" in done.stderr
    assert "Traceback" not in done.stderr
