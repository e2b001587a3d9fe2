"""NIXL and Mooncake as peers of the transfer bench. Runs alone, in the interpreter that has them;
nothing of kvferry is there.

Usage: PYTHON transfer_peer.py nixl|mooncake, with JSON lines on stdin. The first is the geometry::

    {"rows": int, "run_bytes": int, "source": [block, ...], "target": [block, ...]}

Each side holds a cache [rows, blocks, run_bytes]; block i of a sequence is at source[i] here and at
target[i] there. Then, for each line ``{"blocks": int, "count": int, "slab_bytes": int}``, that many
transfers are made, each of the blocks after those of the last one. The answers are lines of MARK
and JSON: ``{"name": str}`` to the first, ``{"latencies_s": [float], "cpu_s": float}`` to others.

Without slabs (0) there is a descriptor per row and block, written straight to its place, as users
of both do it. With slabs, each is gathered, written as one piece, and scattered by the other side
while the next one is gathered. Nothing is digested either way.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

MARK = "RESULT "
STAGING = 64 << 20
NUM_SLABS = 4


class Nixl:
    """One agent over UCX; whatever UCX_TLS says is what it may use."""

    def __init__(self, turns: bool) -> None:
        """``turns``: have NIXL's own thread turn the agent, for a side that only waits."""
        self._api = importlib.import_module("nixl_cu12._api")
        config = self._api.nixl_agent_config(enable_prog_thread=turns, backends=["UCX"])
        self.agent = self._api.nixl_agent("target" if turns else "source", config)
        self.name = "NIXL"
        self._peer: Any = None
        self._runs: Any = None

    def register(self, memory: np.ndarray) -> None:
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def description(self) -> str:
        return str(self.agent.get_agent_metadata().hex())

    def meet(self, description: str) -> None:
        self._peer = self.agent.add_remote_agent(bytes.fromhex(description))

    def prepare(self, here: np.ndarray, there: np.ndarray, nbytes: int) -> None:
        """Runs of equal length at these addresses."""
        self._runs = tuple(
            self.agent.prep_xfer_dlist(
                name,
                np.stack([at, np.full_like(at, nbytes), np.zeros_like(at)], axis=1),
                "DRAM",
            )
            for name, at in (("NIXL_INIT_AGENT", here), (self._peer, there))
        )

    def write_runs(self, chosen: np.ndarray) -> None:
        here, there = self._runs
        self._finish(self.agent.make_prepped_xfer("WRITE", here, chosen, there, chosen))

    def write(self, here: int, there: int, nbytes: int) -> None:
        descriptors = (self.agent.get_xfer_descs([(at, nbytes, 0)], "DRAM") for at in (here, there))
        self._finish(self.agent.initialize_xfer("WRITE", *descriptors, self._peer))

    def _finish(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
        self.agent.release_xfer_handle(handle)


class Mooncake:
    """The transfer engine over its own TCP transport."""

    BATCH = 1024

    def __init__(self, turns: bool) -> None:
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self.name = "Mooncake"
        self._peer = ""
        self._runs: Any = None

    def register(self, memory: np.ndarray) -> None:
        self._check(self.engine.register_memory(memory.ctypes.data, memory.nbytes))

    def description(self) -> str:
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    def meet(self, description: str) -> None:
        self._peer = description

    def prepare(self, here: np.ndarray, there: np.ndarray, nbytes: int) -> None:
        self._runs = (here, there, nbytes)

    def write_runs(self, chosen: np.ndarray) -> None:
        here, there, nbytes = self._runs
        # Its queue refuses longer batches.
        for part in np.split(chosen, range(self.BATCH, len(chosen), self.BATCH)):
            self._check(
                self.engine.batch_transfer_sync_write(
                    self._peer, here[part].tolist(), there[part].tolist(), [nbytes] * len(part)
                )
            )

    def write(self, here: int, there: int, nbytes: int) -> None:
        self._check(self.engine.transfer_sync_write(self._peer, here, there, nbytes))

    @staticmethod
    def _check(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"Mooncake: status {status}")


Engine = Nixl | Mooncake
ENGINES: dict[str, type[Nixl] | type[Mooncake]] = {"nixl": Nixl, "mooncake": Mooncake}


class Side:
    """A cache and slabs, registered."""

    def __init__(self, engine: Any, geometry: dict[str, Any], table: list[int]) -> None:
        rows, self.run_bytes = geometry["rows"], geometry["run_bytes"]
        self.table = np.array(table)
        self.cache = np.full((rows, len(table), self.run_bytes), 1, np.uint8)
        self.block_bytes = rows * self.run_bytes
        self.staging = np.full(STAGING, 1, np.uint8)
        engine.register(self.cache)
        engine.register(self.staging)

    def addresses(self) -> np.ndarray:
        """Of each run, [block of the sequence, row] flat."""
        row_bytes = self.cache[0].nbytes
        rows = np.arange(len(self.cache)) * row_bytes
        at = self.table[:, None] * self.run_bytes + rows[None, :]
        flat: np.ndarray = (self.cache.ctypes.data + at).reshape(-1).astype(np.uint64)
        return flat

    def slab(self, offset: int, count: int) -> np.ndarray:
        """[rows, blocks, run_bytes] of a slab."""
        flat = self.staging[offset : offset + count * self.block_bytes]
        return flat.reshape(len(self.cache), count, self.run_bytes)

    def gather(self, offset: int, begin: int, end: int) -> None:
        out = self.slab(offset, end - begin)
        np.take(self.cache, self.table[begin:end], axis=1, out=out, mode="clip")

    def scatter(self, offset: int, begin: int, end: int) -> None:
        self.cache[:, self.table[begin:end]] = self.slab(offset, end - begin)


def serve_target(name: str) -> None:
    """Say where the memory is, then scatter what has been written to slabs, line by line."""
    geometry = json.loads(sys.stdin.readline())
    engine = ENGINES[name](True)
    side = Side(engine, geometry, geometry["target"])
    where = {
        "description": engine.description(),
        "runs": side.addresses().tolist(),
        "staging": side.staging.ctypes.data,
    }
    print(MARK + json.dumps(where), flush=True)
    for line in sys.stdin:
        if line.startswith("cpu"):
            print(f"{MARK}{time.process_time()}", flush=True)
        else:
            side.scatter(*map(int, line.split()))
            print(MARK, flush=True)


class Initiator:
    """Drives a target of its own."""

    def __init__(self, name: str, geometry: dict[str, Any]) -> None:
        self.target = subprocess.Popen(
            [sys.executable, __file__, name, "target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.moved = 0
        self.tell(json.dumps(geometry))
        where = json.loads(self.hear())
        self.engine = ENGINES[name](False)
        self.side = Side(self.engine, geometry, geometry["source"])
        self.engine.meet(where["description"])
        self.there = where["staging"]
        runs = np.array(where["runs"], np.uint64)
        self.engine.prepare(self.side.addresses(), runs, self.side.run_bytes)

    def tell(self, line: str) -> None:
        assert self.target.stdin is not None
        self.target.stdin.write(f"{line}\n")
        self.target.stdin.flush()

    def hear(self) -> str:
        """The next answer, among whatever else the libraries print."""
        assert self.target.stdout is not None
        while line := self.target.stdout.readline():
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        raise RuntimeError("the target died")

    def move(self, blocks: int, slab_bytes: int) -> None:
        side, waiting = self.side, 0
        first = self.moved * blocks % (len(side.table) - blocks + 1)
        last, rows = first + blocks, len(side.cache)
        self.moved += 1
        if not slab_bytes:
            self.engine.write_runs(np.arange(first * rows, last * rows, dtype=np.int32))
            return
        step = max(1, slab_bytes // side.block_bytes)
        for number, begin in enumerate(range(first, last, step)):
            if waiting == NUM_SLABS:
                self.hear()
                waiting -= 1
            end = min(last, begin + step)
            offset = number % NUM_SLABS * step * side.block_bytes
            side.gather(offset, begin, end)
            here = side.staging.ctypes.data + offset
            self.engine.write(here, self.there + offset, (end - begin) * side.block_bytes)
            self.tell(f"{offset} {begin} {end}")
            waiting += 1
        for _ in range(waiting):
            self.hear()

    def close(self) -> None:
        assert self.target.stdin is not None
        self.target.stdin.close()
        self.target.wait()

    def cpu_s(self) -> float:
        self.tell("cpu")
        return time.process_time() + float(self.hear())

    def measure(self, wanted: dict[str, Any]) -> dict[str, Any]:
        blocks, slab_bytes = wanted["blocks"], wanted["slab_bytes"]
        self.move(blocks, slab_bytes)
        used, latencies = self.cpu_s(), []
        for _ in range(wanted["count"]):
            started = time.perf_counter()
            self.move(blocks, slab_bytes)
            latencies.append(time.perf_counter() - started)
        return {"latencies_s": latencies, "cpu_s": self.cpu_s() - used}


def main() -> None:
    name = sys.argv[1]
    if sys.argv[2:] == ["target"]:
        serve_target(name)
        return
    initiator = Initiator(name, json.loads(sys.stdin.readline()))
    print(MARK + json.dumps({"name": initiator.engine.name}), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(initiator.measure(json.loads(line))), flush=True)
    initiator.close()


if __name__ == "__main__":
    main()
