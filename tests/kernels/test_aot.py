"""What ahead-of-time compilation finds in crafted launches, and that Triton would find it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import crafted_launches
import pytest
import torch
from crafted_launches import copy, product

from kvferry.kernels.aot import compile_launch, identity
from kvferry.kernels.chips import CHIPS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compiled in a process of its own, with an empty cache."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    program = Path(crafted_launches.__file__)
    done = subprocess.run(
        [sys.executable, "-P", program], env=environment, stdout=subprocess.PIPE, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def matrix(found: dict[str, Any], name: str) -> set[str]:
    return set(found["compiled"][name]["matrix_instructions"])


@pytest.mark.slow
def test_small_tiles_use_the_same_instruction_everywhere(found: dict[str, Any]) -> None:
    for chip in ("A100", "H100", "B200"):
        assert matrix(found, f"small product on {chip}") == {"mma.sync"}


@pytest.mark.slow
def test_large_tiles_use_the_instruction_of_their_generation(found: dict[str, Any]) -> None:
    assert matrix(found, "large product on A100") == {"mma.sync"}
    assert matrix(found, "large product on H100") == {"wgmma"}
    assert matrix(found, "large product on B200") == {"tcgen05.mma"}


@pytest.mark.slow
def test_code_without_products_has_no_matrix_instruction(found: dict[str, Any]) -> None:
    assert matrix(found, "copy on H100") == set()


@pytest.mark.slow
def test_spills_are_seen(found: dict[str, Any]) -> None:
    compiled = found["compiled"]
    assert compiled["spills on H100"]["spills"] > 0
    assert compiled["large product on H100"]["spills"] == 0


@pytest.mark.slow
def test_shared_memory_is_seen(found: dict[str, Any]) -> None:
    compiled = found["compiled"]
    # Both operands of the product wait there: (64 + 256) x 512 values of two bytes.
    assert compiled["too much shared memory on H100"]["shared"] >= 320 * 512 * 2
    assert compiled["too much shared memory on H100"]["shared"] > CHIPS["H100"].shared_limit
    assert compiled["copy on H100"]["shared"] == 0


@pytest.mark.slow
def test_the_tensor_memory_accelerator_is_seen(found: dict[str, Any]) -> None:
    assert found["compiled"]["described on H100"]["uses_tma"] is True
    assert found["compiled"]["copy on H100"]["uses_tma"] is False


@pytest.mark.slow
def test_code_that_writes_nothing_is_seen(found: dict[str, Any]) -> None:
    """Stores by threads, by the tensor memory accelerator and atomics are writes."""
    idle = {name for name, each in found["compiled"].items() if not each["writes"]}
    assert idle == {"idle on H100"}


@pytest.mark.slow
def test_registers_are_of_a_thread(found: dict[str, Any]) -> None:
    registers = {name: each["registers"] for name, each in found["compiled"].items()}
    assert registers.pop("idle on H100") < 16
    assert all(8 <= each <= 255 for each in registers.values()), registers


@pytest.mark.slow
def test_tritons_launcher_finds_everything_in_its_cache(found: dict[str, Any]) -> None:
    """So what was compiled ahead of time is, byte for byte, what a GPU runs."""
    assert len(found["missed"]) >= 8
    assert {name for name, count in found["missed"].items() if count} == set()


def test_the_interpreter_compiles_nothing() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_launch(copy(1000), CHIPS["H100"])


def test_launches_that_compile_alike_are_identical() -> None:
    assert identity(copy(1000)) == identity(copy(1001))
    assert identity(copy(1024)) == identity(copy(2048))
    assert identity(product(16, 16, 16, 1)) == identity(product(16, 16, 16, 1))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(copy(1024), id="a multiple of 16"),
        pytest.param(copy(1000, 2), id="a stride that is not 1"),
        pytest.param(copy(2**33 + 1), id="64 bits"),
        pytest.param(copy(1000, extra=True), id="an optional tensor"),
        pytest.param(copy(1000, offset=1), id="an unaligned pointer"),
        pytest.param(product(16, 16, 16, 1), id="another kernel"),
    ],
)
def test_launches_that_compile_differently_are_told_apart(other: Any) -> None:
    assert identity(other) != identity(copy(1000))


def test_constants_types_and_warps_tell_launches_apart() -> None:
    seen = {
        identity(product(*sizes)) for sizes in ((16, 16, 16, 1), (16, 16, 16, 2), (32, 16, 16, 1))
    }
    assert len(seen) == 3
    half = product(16, 16, 16, 1)
    half.args["p_a"] = torch.empty(16, 16, dtype=torch.float16, device="meta")
    assert identity(half) not in seen
