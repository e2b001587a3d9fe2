"""What ranks do together: sums in their order, parts side by side, and waits that end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_threads import on_ranks

from kvferry.core.errors import RankLost
from kvferry.engine.collectives import TorchCollectives, gloo_collectives


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_sums_are_made_in_the_order_of_the_ranks(size: int, rows: int) -> None:
    """So they do not depend on how many rows there are: a ring's would."""
    addends = torch.randn(size, rows, 7, generator=torch.Generator().manual_seed(rows))
    expected = addends[0].clone()
    for addend in addends[1:]:
        expected += addend
    sums = on_ranks(size, lambda ranks: ranks.sum(addends[ranks.rank].clone()))
    assert all(torch.equal(total, expected) for total in sums)


def test_a_sum_stays_when_the_next_is_made() -> None:
    def run(ranks: TorchCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        return ranks.sum(torch.ones(4)), ranks.sum(torch.full((4,), 2.0))

    for first, second in on_ranks(3, run):
        assert first.tolist() == [3.0] * 4
        assert second.tolist() == [6.0] * 4


def test_parts_of_different_widths_are_gathered_on_rank_0() -> None:
    widths = [1, 3, 2]

    def run(ranks: TorchCollectives) -> torch.Tensor:
        return ranks.gather(torch.full((2, widths[ranks.rank]), float(ranks.rank)), widths)

    first, *others = on_ranks(3, run)
    assert first.tolist() == [[0.0, 1.0, 1.0, 1.0, 2.0, 2.0]] * 2
    assert [part.shape for part in others] == [(2, 0)] * 2


def test_a_rank_that_takes_part_in_nothing_is_lost() -> None:
    store = dist.HashStore()
    errors: list[Exception] = []

    def join(rank: int) -> None:
        ranks = gloo_collectives(store, rank, 2, timeout_s=1.0)
        if rank == 0:
            try:
                ranks.sum(torch.ones(3))
            except RankLost as error:
                errors.append(error)
        else:
            silent.wait(20.0)

    silent = threading.Event()
    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(20.0)
    silent.set()
    threads[1].join(20.0)
    assert [type(error) for error in errors] == [RankLost]


def test_an_abort_ends_what_another_thread_waits_for() -> None:
    store = dist.HashStore()
    joined: dict[int, TorchCollectives] = {}
    errors: list[Exception] = []

    def join(rank: int) -> None:
        joined[rank] = gloo_collectives(store, rank, 2, timeout_s=60.0)
        if rank == 0:
            try:
                joined[0].sum(torch.ones(3))
            except RankLost as error:
                errors.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[1].join(20.0)
    while 0 not in joined:
        time.sleep(0.001)
    joined[0].abort()
    threads[0].join(20.0)
    assert not threads[0].is_alive()
    assert [type(error) for error in errors] == [RankLost]
