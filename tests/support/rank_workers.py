"""Backends of tensor-parallel workers whose other ranks are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from local_system import SECRET
from tiny_models import VOCAB_SIZE

from kvferry.core.config import Config
from kvferry.decode_worker.rank import DecodeRank
from kvferry.engine.backend import Backend
from kvferry.engine.loading import load_backend
from kvferry.engine.rank_group import RankGroup
from kvferry.prefill_worker.rank import PrefillRank

LIMIT_S = 60.0
ROLES = {"prefill": PrefillRank, "decode": DecodeRank}


class RankThreads:
    """Starts workers' ranks as ``local_system`` asks for backends, and notes what became of
    them.
    """

    def __init__(self, folder: Path, config: Config, vocab_size: int = VOCAB_SIZE) -> None:
        self.errors: list[Exception] = []
        self._folder = folder
        self._config = config
        self._vocab_size = vocab_size
        self._threads: list[threading.Thread] = []

    def backend(self, role: str) -> Callable[[int], Backend]:
        """``local_system``'s way to ask for a backend; block sizes are the configuration's."""

        def load(block_size: int) -> Backend:
            pool = self._config.prefill if role == "prefill" else self._config.decode
            what = self._folder, self._vocab_size, self._config.model, pool, role
            if pool.tp == 1:
                return load_backend(*what)
            group = RankGroup(pool.tp, SECRET)
            for rank in range(1, pool.tp):
                name = f"{role} rank {rank}"
                thread = threading.Thread(target=self._run, args=(role, group, rank), name=name)
                self._threads.append(thread)
                thread.start()
            return load_backend(*what, group, LIMIT_S)

        return load

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def _run(self, role: str, group: RankGroup, rank: int) -> None:
        config = self._config
        try:
            joined = ROLES[role].join(
                group.port, rank, self._folder, self._vocab_size, config, SECRET
            )
            joined.run()
        except Exception as error:
            self.errors.append(error)


@contextmanager
def rank_threads(folder: Path, config: Config, **options: int) -> Iterator[RankThreads]:
    """Ended with the workers, or failing."""
    ranks = RankThreads(folder, config, **options)
    yield ranks
    ranks.join()
    assert ranks.errors == []
