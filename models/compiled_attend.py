"""The attention of one step by the CPU's library: a decoder's callback, layer by layer, and what
fused layers need to run it between their own operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels.cpu.attention import StepBatch, attend, rotate_and_keep
from kvferry.kernels.cpu.library import CpuOps
from kvferry.models.decoder import Heads


@dataclass(frozen=True, slots=True, eq=False)
class CompiledAttend:
    """An ``Attend``."""

    ops: CpuOps
    batch: StepBatch
    caches: Sequence[ctypes.Structure]
    """Each layer's. See ``kernels/cpu/attention.py:cache_of``."""

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        if self.batch.rotation is None:
            self.batch.rotate_by(heads.cos, heads.sin)
        norms = None
        if heads.q_norm is not None and heads.k_norm is not None:
            norms = heads.q_norm, heads.k_norm, heads.eps
        cache = self.caches[layer]
        q = rotate_and_keep(self.ops, (heads.q, heads.k, heads.v), norms, cache, self.batch)
        return attend(self.ops, q, cache, self.batch)
