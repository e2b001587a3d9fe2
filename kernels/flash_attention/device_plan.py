"""The work list of a prefill step on the device, for all layers of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.flash_attention.plan import TILE_ROWS, Lengths, tiles_of
from kvferry.kernels.upload import uploaded


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
