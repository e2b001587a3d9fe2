"""The dispatch table: op x backend -> function. Chosen once, when a model is loaded.

A backend is a column. The functions of one row have one name, one signature and one meaning;
nothing asks at run time what a tensor lies on. Modules of a column are imported when the column is
chosen, so that a process on a CPU never loads Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib import import_module
from typing import Any

Op = Callable[..., Any]


class Backend(StrEnum):
    """What runs the ops."""

    TORCH = "torch"
    """Plain torch, on any device: the reference of the others."""
    CPU = "cpu"
    """C for float32 where the installation has compiled it, else plain torch."""
    TRITON = "triton"
    """Triton kernels; dense products stay with the vendor's library."""
    TRITON_BATCH_INVARIANT = "triton_batch_invariant"
    """Triton with fixed tiles, splits and products: no row depends on its neighbours."""

    @property
    def is_triton(self) -> bool:
        return self in (Backend.TRITON, Backend.TRITON_BATCH_INVARIANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One column of the table. Signatures are in ``reference.py`` of each op's folder."""

    linear: Op
    rms_norm: Op
    add_rms_norm: Op
    rope_kv_write: Op
    swiglu: Op
    geglu: Op
    embedding: Op
    flash_attention: Op
    plan_splits: Op
    flash_decoding: Op
    add_tokens: Op
    apply_edits: Op
    sample: Op
    top_logprobs: Op
    verify_coupled: Op
    verify_rejection: Op
    quant_matmul: Op
    gather_kv: Op
    scatter_kv: Op
    copy_blocks: Op
    swap_out: Op
    swap_in: Op


_VENDOR = "torch.nn.functional:linear"


def _unit(folder: str, name: str, cpu: str | None = None) -> dict[Backend, str]:
    """A row whose kernel is batch-invariant as it is, or by the plan that it is given. ``cpu``: the
    file of the CPU's own, where it has one.
    """
    reference = f"kvferry.kernels.{folder}.reference:{name}"
    twin = f"kvferry.kernels.{folder}.wrapper:{name}"
    return {
        Backend.TORCH: reference,
        Backend.CPU: f"kvferry.kernels.cpu.{cpu}:{name}" if cpu else reference,
        Backend.TRITON: twin,
        Backend.TRITON_BATCH_INVARIANT: twin,
    }


TABLE: dict[str, dict[Backend, str]] = {
    "linear": {
        Backend.TORCH: _VENDOR,
        Backend.CPU: "kvferry.kernels.cpu.linear:linear",
        Backend.TRITON: _VENDOR,
        Backend.TRITON_BATCH_INVARIANT: "kvferry.kernels.matmul.wrapper:matmul",
    },
    "rms_norm": _unit("rms_norm", "rms_norm", cpu="rows"),
    "add_rms_norm": _unit("rms_norm", "add_rms_norm", cpu="rows"),
    "rope_kv_write": _unit("rope_kv_write", "rope_kv_write"),
    "swiglu": _unit("gated", "swiglu", cpu="rows"),
    "geglu": _unit("gated", "geglu"),
    "embedding": _unit("embedding", "embedding"),
    "flash_attention": _unit("flash_attention", "flash_attention"),
    "plan_splits": _unit("flash_decoding", "plan_splits"),
    "flash_decoding": _unit("flash_decoding", "flash_decoding"),
    "add_tokens": _unit("sampling", "add_tokens"),
    "apply_edits": _unit("sampling", "apply_edits"),
    "sample": _unit("sampling", "sample"),
    "top_logprobs": _unit("sampling", "top_logprobs"),
    "verify_coupled": _unit("sampling", "verify_coupled"),
    "verify_rejection": _unit("sampling", "verify_rejection"),
    "quant_matmul": _unit("quant_matmul", "quant_matmul"),
    "gather_kv": _unit("kv_pack", "gather"),
    "scatter_kv": _unit("kv_pack", "scatter"),
    "copy_blocks": _unit("kv_pack", "copy_blocks"),
    "swap_out": _unit("kv_pack", "swap_out"),
    "swap_in": _unit("kv_pack", "swap_in"),
}
"""Op -> backend -> ``module:function``."""


def backend_for(device_type: str, *, batch_invariant: bool = False) -> Backend:
    """The column for tensors on a device: ``cpu`` or ``cuda``."""
    if device_type == "cpu":
        return Backend.CPU
    return Backend.TRITON_BATCH_INVARIANT if batch_invariant else Backend.TRITON


def ops_for(backend: Backend) -> Ops:
    """One column, its modules imported. Raises ImportError when Triton is not installed."""
    return Ops(**{field.name: _load(TABLE[field.name][backend]) for field in fields(Ops)})


def _load(where: str) -> Op:
    module, name = where.split(":")
    function: Op = getattr(import_module(module), name)
    return function
