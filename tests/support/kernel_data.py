"""Random inputs of kernels, and the comparison of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def random_tensors(seed: int) -> Callable[..., torch.Tensor]:
    """A maker of standard normal tensors: ``make(*shape, dtype=torch.float32)``."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return make


def relative_error(
    out: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None
) -> float:
    """max |out - expected| / max |expected|, NaN when an output is NaN. ``scale``: of what the
    outputs are sums of; they may cancel, and are no more exact for that.
    """
    out, expected = out.double(), expected.double()
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    if scale is not None:
        largest = largest.maximum(scale.double().max())
    return float((out - expected).abs().max() / largest)


def assert_close(
    out: torch.Tensor,
    expected: torch.Tensor,
    bounds: Mapping[torch.dtype, float],
    scale: torch.Tensor | None = None,
) -> None:
    """Same shape and type, and a relative error within the bound of the type."""
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    if not out.numel():
        return
    error = relative_error(out, expected, scale)
    # A NaN compares as false, so that poison that leaks fails.
    assert error <= bounds[out.dtype], f"relative error {error:.3g} > {bounds[out.dtype]:.3g}"
