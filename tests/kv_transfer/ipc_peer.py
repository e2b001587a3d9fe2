"""A sender over cuda_ipc in a process of its own: fills each slab with its number, says so, waits.

Usage: ipc_peer.py LIBRARY ENDPOINT NUM_SLABS SLAB_BYTES
"""

from __future__ import annotations

import signal
import sys

from fake_cuda import fake_ipc_channel

from kvferry.kv_transfer.transports.control import dial_unix

TIMEOUT_S = 30.0


def main(library: str, endpoint: str, num_slabs: int, slab_bytes: int) -> None:
    channel = fake_ipc_channel(library, dial_unix(endpoint, TIMEOUT_S))
    outlet = channel.open_outlet(num_slabs, slab_bytes, TIMEOUT_S)
    for slab in range(num_slabs):
        outlet.slab(slab).fill_(slab + 1)
        outlet.push(slab, 1, slab_bytes)
        assert not outlet.in_flight(slab)
    channel.send(b"filled", TIMEOUT_S)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
