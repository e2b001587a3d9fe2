"""The dispatch table: whole, with twins of one signature, and chosen without loading Triton."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from kvferry.kernels.ops import TABLE, Backend, Ops, backend_for, ops_for


def parameters(op: object) -> list[tuple[str, object, object]]:
    """(name, kind, default) of what a caller can pass."""
    assert callable(op)
    return [(p.name, p.kind, p.default) for p in inspect.signature(op).parameters.values()]


def test_the_table_is_the_ops() -> None:
    assert set(TABLE) == {field.name for field in fields(Ops)}
    assert all(set(row) == set(Backend) for row in TABLE.values())


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"linear"}))
def test_twins_have_one_signature(name: str) -> None:
    by_backend = {backend: getattr(ops_for(backend), name) for backend in Backend}
    torch_op = by_backend[Backend.TORCH]
    for backend, op in by_backend.items():
        assert backend.is_triton == (".wrapper:" in TABLE[name][backend])
        assert not backend.is_triton or op is not torch_op
        assert op.__name__ == torch_op.__name__
        assert parameters(op) == parameters(torch_op)


def test_the_product_of_torch_and_of_fast_triton_is_the_vendors() -> None:
    vendor = ops_for(Backend.TRITON).linear
    assert vendor is ops_for(Backend.TORCH).linear
    for ours in (ops_for(Backend.TRITON_BATCH_INVARIANT).linear, ops_for(Backend.CPU).linear):
        assert ours is not vendor
        assert [name for name, _, _ in parameters(ours)][1:] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("device", "batch_invariant", "backend"),
    [
        ("cpu", False, Backend.CPU),
        ("cpu", True, Backend.CPU),
        ("cuda", False, Backend.TRITON),
        ("cuda", True, Backend.TRITON_BATCH_INVARIANT),
    ],
)
def test_a_device_has_one_backend(device: str, batch_invariant: bool, backend: Backend) -> None:
    assert backend_for(device, batch_invariant=batch_invariant) is backend


def test_a_cpu_process_never_loads_triton() -> None:
    code = (
        "import sys; from kvferry.engine import runner; from kvferry.kernels.ops import *; "
        "ops_for(Backend.CPU); assert 'triton' not in sys.modules; "
        "ops_for(Backend.TRITON); assert 'triton' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
