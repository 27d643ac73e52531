"""Objects that the ranks of an island exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.diloco.island_group import IslandGroup
from elastic.protocol.messages import Place
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from harness.fakes import collectives as fake


def function() -> Callable[[int], int]:
    return lambda value: 2 * value


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (function, lambda received: received(4)),
        (lambda: torch.full((3,), 7, dtype=torch.uint16), lambda received: received.tolist()),
        (lambda: torch.arange(5000.0), lambda received: received.tolist()),
    ],
)
def test_island_broadcast_supports_objects_beyond_plain_pickle(make, read, monkeypatch):
    """Ranks 1 and 2 of the world are an island."""
    ranks, local = (1, 2), threading.local()
    groups = fake.world(2)
    monkeypatch.setattr(lifecycle, "current", lambda: local.rt)

    def run(rank: int) -> Any:
        rt = local.rt = create_autospec(WorkerRuntime, instance=True)
        rt.place = Place(rank, 3, 0, 1, rank, 3)
        rt.group.return_value = groups[rank - 1]
        rt.guard.return_value = nullcontext()
        group = IslandGroup.__new__(IslandGroup)
        group.ranks = ranks
        return IslandGroup.broadcast_object(group, make() if rank == 2 else None, 2)

    with ThreadPoolExecutor(2) as pool:
        received, sent = pool.map(run, ranks)
    assert received is not sent
    assert read(received) == read(sent)
