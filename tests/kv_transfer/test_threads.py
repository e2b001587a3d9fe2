"""Ending threads."""

from __future__ import annotations

import threading

import pytest

from kvferry.kv_transfer.threads import join_all

WAIT_S = 20.0


def test_all_are_waited_for_and_those_that_do_not_end_are_named() -> None:
    gate = threading.Event()
    threads = [
        threading.Thread(target=work, name=name)
        for name, work in (("one", gate.wait), ("two", lambda: None), ("three", gate.wait))
    ]
    for thread in threads:
        thread.start()
    threads[1].join(WAIT_S)
    with pytest.raises(TimeoutError, match=r"^one, three: no end"):
        join_all(threads, 0.01)
    gate.set()
    join_all(threads, WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
