"""The work list of a prefill step on the device, for all layers of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.flash_attention.plan import TILE_ROWS, Lengths, tiles_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillPlan:
    """How the queries of one step are cut into tiles."""

    rows: int
    """Query rows per tile; the last tile of a sequence may have fewer."""
    tiles: torch.Tensor
    """int32 [num_tiles, 2] as ``tiles_of`` lists them, on the device of the queries."""

    @classmethod
    def of(
        cls,
        query_lens: Lengths,
        context_lens: Lengths,
        *,
        window: int | None = None,
        rows: int = TILE_ROWS,
        device: torch.device | str = "cpu",
    ) -> PrefillPlan:
        """Tiles of all sequences. Raises ValueError for lengths that no step has."""
        tiles = tiles_of(query_lens, context_lens, window=window, rows=rows)
        return cls(rows=rows, tiles=uploaded(tiles, device))


def uploaded(numbers: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Numbers as int32 on a device, for whose arrival the host does not wait."""
    host = torch.from_numpy(numbers.astype(np.int32))
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
