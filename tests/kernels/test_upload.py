"""Numbers arrive as they are, without a wait of the host where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.kernels.upload import uploaded


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3)])
def test_type_and_shape_are_kept(dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    there = uploaded(array, torch.device("cpu"))
    assert there.shape == shape
    np.testing.assert_array_equal(there.numpy(), array, strict=True)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_kernels() -> None:
    square = torch.ones(8192, 8192, device="cuda")
    # The first pinned memory is the driver's to give, and that may wait.
    uploaded(np.arange(100), "cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        square @ square
    done = torch.cuda.Event()
    there = uploaded(np.arange(100), "cuda")
    done.record()
    assert not done.query()
    np.testing.assert_array_equal(there.cpu().numpy(), np.arange(100))
