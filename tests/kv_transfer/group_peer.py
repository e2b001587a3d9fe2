"""A sender over gloo in a process of its own: fills slabs by their number, pushes what is pulled.

Usage: group_peer.py ENDPOINT NUM_SLABS SLAB_BYTES NUM_PUSHES. After so many pushes it stands still.
"""

from __future__ import annotations

import signal
import sys

from kvferry.kv_transfer.frames import decode_to_sender
from kvferry.kv_transfer.messages import Pull
from kvferry.kv_transfer.transports.process_group import connect_gloo

TIMEOUT_S = 30.0


def main(endpoint: str, num_slabs: int, slab_bytes: int, num_pushes: int) -> None:
    channel = connect_gloo(endpoint, TIMEOUT_S)
    outlet = channel.open_outlet(num_slabs, slab_bytes, TIMEOUT_S)
    for slab in range(num_slabs):
        outlet.slab(slab)[:] = bytes([slab + 1]) * slab_bytes
    for _ in range(num_pushes):
        frame = channel.receive(TIMEOUT_S)
        while frame is None:
            frame = channel.receive(TIMEOUT_S)
        message = decode_to_sender(frame)
        assert isinstance(message, Pull), message
        outlet.push(message.slab, message.grant, slab_bytes)
    print("stands still", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
