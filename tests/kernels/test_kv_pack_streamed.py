"""A gather sends its tiles over a connection as it fills them; a scatter takes them from there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from host_moves import make_move
from paged_caches import copied, poison, same_bytes

from kvferry.kernels.kv_pack.host import follow, gather
from kvferry.kernels.kv_pack.host_cache import HostCache
from kvferry.kernels.kv_pack.host_compiled import CompiledPack
from kvferry.kernels.kv_pack.progress import Progress, Stream

PATIENT_S, HASTY_S = 20.0, 0.01
NUM_TOKENS = 2048
SHAPE = (2, 2, NUM_TOKENS, 2, 64)


@pytest.fixture
def pack(compiled: CompiledPack) -> CompiledPack:
    return compiled


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


class Side:
    """A cache, a move of all of it that has several tiles, and a slab."""

    def __init__(self, seed: int, wire: torch.dtype = torch.float32) -> None:
        self.kv = poison(SHAPE, torch.float32, seed)
        self.cache = HostCache(self.kv, 16)
        self.move = make_move(
            blocks=np.random.default_rng(seed).permutation(NUM_TOKENS // 16).astype(np.int32),
            tokens=(5, NUM_TOKENS - 3),
            layers=(0, 2),
            heads=(0, 2),
            wire=wire,
        )
        self.slab = memoryview(bytearray(self.cache.shape(self.move).nbytes))


def send(side: Side, sock: socket.socket, pack: CompiledPack) -> list[int]:
    """What does not leave during the gather leaves after it, as with a push."""
    stream = Stream(sock.fileno())
    digests = gather(side.cache, side.move, side.slab, pack, Progress(stream, 7))
    sock.sendall(side.slab[stream.moved :])
    return digests


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_what_is_followed_is_what_was_gathered(pack, ends, wire: torch.dtype) -> None:
    source, target = Side(1, wire), Side(2, wire)
    coming = Stream(ends[1].fileno())
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, source, ends[0], pack)
        progress = Progress(coming, 7, PATIENT_S)
        found = follow(target.cache, target.move, target.slab, pack, progress)
        assert found == sending.result()
    assert len(found) > 3
    assert coming.moved == len(target.slab)
    assert target.slab == source.slab


def test_each_tile_is_sent_as_soon_as_it_is_filled(pack, ends) -> None:
    """As far as the kernel takes them, which is never waited for."""
    source = Side(1)
    stream = Stream(ends[0].fileno())
    gather(source.cache, source.move, source.slab, pack, Progress(stream, 7))
    assert 0 < stream.moved < len(source.slab)
    assert ends[1].recv(stream.moved, socket.MSG_WAITALL) == source.slab[: stream.moved]
    with pytest.raises(BlockingIOError):
        ends[1].recv(1, socket.MSG_DONTWAIT)


def test_a_stream_that_stands_still_is_given_up_where_it_stands(pack, ends) -> None:
    source, target = Side(1), Side(2)
    digests = gather(source.cache, source.move, source.slab, pack)
    before = copied(target.kv)
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(ends[0].sendall, source.slab[: len(source.slab) // 2])
        stream = Stream(ends[1].fileno())
        progress = Progress(stream, 7, HASTY_S)
        while follow(target.cache, target.move, target.slab, pack, progress) is None:
            if half.done():
                break
    assert not same_bytes(before, target.kv)
    ends[0].setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ends[0].sendall, source.slab[len(source.slab) // 2 :])
        progress = Progress(stream, 7, PATIENT_S)
        assert follow(target.cache, target.move, target.slab, pack, progress) == digests


def test_nothing_beyond_the_slab_is_read(pack, ends) -> None:
    source, target = Side(1), Side(2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, source, ends[0], pack)
        progress = Progress(Stream(ends[1].fileno()), 7, PATIENT_S)
        follow(target.cache, target.move, target.slab, pack, progress)
        sending.result()
    ends[0].sendall(b"next")
    assert ends[1].recv(100) == b"next"


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_peer_that_is_gone_is_left_to_the_caller(pack, ends, is_closed: bool) -> None:
    source, target = Side(1), Side(2)
    if is_closed:
        ends[0].close()
        coming = Stream(ends[1].fileno())
        progress = Progress(coming, 7, PATIENT_S)
        assert follow(target.cache, target.move, target.slab, pack, progress) is None
        assert coming.moved == 0
    else:
        ends[1].close()
        stream = Stream(ends[0].fileno())
        assert gather(source.cache, source.move, source.slab, pack, Progress(stream, 7))
        assert stream.moved == 0
