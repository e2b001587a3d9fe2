"""Moves of whole blocks that a step plan asks for, on the paged cache: swaps and copies.

Only the runner touches host slots, in the order of the steps, so that they need no fences.
"""

from __future__ import annotations

import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.plan import Int32, StepPlan

BLOCKS_AT_ONCE = 64
"""Gathered at once at most: what bounds the memory that a move takes beside the cache."""


def move_blocks(kv: PagedKV, plan: StepPlan) -> None:
    """Do the moves of ``plan``: out to the host, in from it, then copies within the cache.

    Within one kind no block or slot is a target twice, and no target is a source. Values and
    scales. Raises ValueError when there are swaps and the cache has no host slots.
    """
    if not plan.has_moves:
        return
    pairs = [(kv.tensor, kv.host), (kv.scales, kv.host_scales)]
    for device, host in pairs:
        if device is None:
            continue
        if host is not None:
            _copy(device, host, plan.swap_out)
            _copy(host, device, plan.swap_in)
        elif len(plan.swap_out) or len(plan.swap_in):
            raise ValueError("the cache has no host slots to swap blocks to")
        _copy(device, device, plan.copies)


def _copy(source: torch.Tensor, target: torch.Tensor, moves: Int32) -> None:
    """``target[:, :, to] = source[:, :, at]`` for each (at, to) of ``moves``."""
    # As bytes, since not every operation knows every element type.
    source, target = source.view(torch.uint8), target.view(torch.uint8)
    for start in range(0, len(moves), BLOCKS_AT_ONCE):
        at, to = torch.from_numpy(moves[start : start + BLOCKS_AT_ONCE].astype("int64")).unbind(1)
        gathered = source.index_select(2, at.to(source.device))
        target.index_copy_(2, to.to(target.device), gathered.to(target.device))
