"""The work list of a prefill step: which program attends for which rows of which sequence.

A tile is ``rows`` consecutive query rows of one sequence and costs as many steps as its last row
sees keys, so tiles of one batch differ by orders of magnitude. Programs start in the order of the
list: the longest first (LPT, Graham, "Bounds on multiprocessing timing anomalies", 1969: at most
4/3 of the best makespan), so that what runs last, while other SMs are idle, is short. Lengths are
known to the host when a step is planned, hence NumPy; all layers of the step use one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_ROWS = 128
"""Query rows per tile in all tuned configurations: two warp groups of wgmma on Hopper."""


Lengths = Sequence[int] | NDArray[Any]
"""One number of tokens per sequence."""


def tiles_of(
    query_lens: Lengths,
    context_lens: Lengths,
    *,
    window: int | None = None,
    rows: int = TILE_ROWS,
) -> NDArray[np.int32]:
    """[num_tiles, 2], heaviest first, equal ones in batch order: sequence, and first row counted
    from its first query. The last tile of a sequence may have fewer than ``rows``.

    The order decides when a tile is computed and never what: results do not depend on it.
    Raises ValueError for lengths that no step has.
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    contexts = np.asarray(context_lens, dtype=np.int64)
    if queries.shape != contexts.shape or queries.ndim != 1:
        raise ValueError("context_lens: must be as many as query_lens")
    if (queries < 0).any() or (contexts < 0).any():
        raise ValueError("query_lens, context_lens: must not be negative")
    if rows <= 0 or (window is not None and window <= 0):
        raise ValueError("rows, window: must be positive")
    per_seq = -(-queries // rows)
    seqs = np.repeat(np.arange(len(queries)), per_seq)
    before = np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
    first_rows = (np.arange(len(seqs)) - before) * rows
    cost = keys_seen(
        contexts[seqs] + first_rows, np.minimum(rows, queries[seqs] - first_rows), window
    )
    order = np.argsort(-cost, kind="stable")
    return np.stack([seqs, first_rows], axis=1)[order].astype(np.int32)


def keys_seen(
    first_position: NDArray[np.int64], num_rows: NDArray[np.int64], window: int | None
) -> NDArray[np.int64]:
    """How many keys at least one of ``num_rows`` rows from ``first_position`` sees."""
    end = first_position + num_rows
    if window is None:
        return end
    return end - np.maximum(0, first_position - window + 1)
