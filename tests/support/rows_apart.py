"""Products in Triton's interpreter as a tensor core makes them: a row does not depend on others.

NumPy's BLAS adds a row up in another order beside others on some CPUs (those that have AVX2 alone),
which hides whether a kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def rows_apart() -> Iterator[None]:
    """Each row of a product [M, K] @ [K, N] is one of its own."""
    whole = InterpreterBuilder.create_dot

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any
    ) -> TensorHandle:
        rows = [whole(self, _row(a, i), b, _row(d, i), *options).data for i in range(len(a.data))]
        return TensorHandle(np.concatenate(rows), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


def _row(tensor: TensorHandle, index: int) -> TensorHandle:
    return TensorHandle(tensor.data[index : index + 1].copy(), tensor.dtype)
