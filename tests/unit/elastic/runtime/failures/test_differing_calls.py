"""Ranks that have called different collectives exchange their calls."""

from __future__ import annotations

import threading
from typing import Any

from elastic.errors import CollectiveFailed, Differing
from elastic.protocol.calls import Called
from elastic.runtime.failures import differing_calls
from harness.groups import at_once

CALLS = [
    Called(0, "allreduce", "a.py:3"),
    Called(4, "broadcast", ""),
    Called(7, "allreduce", "a.py:3"),
]


class Meeting:
    """A store at which all ranks meet under one key."""

    def __init__(self, size: int) -> None:
        self.asked: list[tuple[str, int]] = []
        self._blobs: dict[int, bytes] = {}
        self._all = threading.Barrier(size, timeout=10)

    def exchange(
        self, key: str, rank: int, size: int, blob: bytes, timeout_s: float
    ) -> list[bytes]:
        self.asked.append((key, size))
        self._blobs[rank] = blob
        self._all.wait()
        return [self._blobs[each] for each in range(size)]


def test_calls_of_all_ranks_are_exchanged():
    store: Any = Meeting(3)

    def tell(rank: int) -> list[Called]:
        return differing_calls.of_all(store, Differing("torch 0", rank, 3), CALLS[rank])

    assert at_once(tell, range(3)) == [CALLS] * 3
    assert len(set(store.asked)) == 1


def test_own_call_is_returned_when_peers_do_not_answer():
    class Silent:
        def exchange(self, *_: Any) -> list[bytes]:
            raise CollectiveFailed("gave up waiting")

    silent: Any = Silent()
    group = Differing("torch 0", 1, 3)
    assert differing_calls.of_all(silent, group, CALLS[1]) == [CALLS[1]]
    assert differing_calls.of_all(None, group, CALLS[1]) == [CALLS[1]]
