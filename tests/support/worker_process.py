"""A worker in a process of its own: ``worker_process.py ROLE FOLDER BLOCK_SIZE``.

Prints the hash that this process gives to a string and its session address, serves a tiny float64
model until its standard input ends, then stops in order.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from local_system import SECRET, Worker, local_config
from tiny_system import served_backend

from kvferry.decode_worker.worker import DecodeWorker
from kvferry.prefill_worker.worker import PrefillWorker


async def main(role: str, folder: Path, block_size: int) -> None:
    config = local_config(
        prefill={"block_size": block_size},
        decode={"block_size": block_size},
        transfer={"transport": "auto"},
    )
    backend = served_backend(folder, block_size)
    make = PrefillWorker if role == "prefill" else DecodeWorker
    worker: Worker = make(f"{role}-0", config, backend, SECRET)
    print(hash("kvferry"), await worker.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
