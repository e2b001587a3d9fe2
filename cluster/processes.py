"""The processes of one worker, as Ray actors."""

from __future__ import annotations

from typing import Any

import ray


class Processes:
    """Those of one life of a worker. A new life begins once they were killed."""

    def __init__(self) -> None:
        self._alive: list[Any] = []
        self._killed: list[Any] = []

    def add(self, actor: Any) -> Any:
        self._alive.append(actor)
        return actor

    def kill(self) -> None:
        """At once, whatever they are doing. Does not wait for it.

        Handles are kept until others are killed. When the last one is dropped before the kill
        arrives, Ray asks the process to leave and takes it for gone; one whose threads still run
        would never leave.
        """
        for actor in self._alive:
            ray.kill(actor)
        self._alive, self._killed = [], self._alive or self._killed
