"""Collectives of a worker before its first world: the other ranks have the same data as this one."""

from unittest.mock import create_autospec

import pytest
import torch
from torch import distributed

from elastic.collectives.interface import Op
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.torch_backend import backend_override, collective_calls
from elastic.torch_backend.collectives_before_joining import MirrorCollectives


def test_mirror_collectives_simulate_peers_with_equal_data():
    group = MirrorCollectives(1, 3)
    total, most = torch.tensor([2.0]), torch.tensor([2.0])
    group.allreduce(total, Op.SUM).wait()
    group.allreduce(most, Op.MAX).wait()
    assert (total.item(), most.item()) == (6.0, 2.0)
    rows = [torch.zeros(2) for _ in range(3)]
    group.allgather(rows, torch.tensor([1.0, 2.0])).wait()
    assert [row.tolist() for row in rows] == [[1.0, 2.0]] * 3
    received = torch.zeros(3)
    group.alltoall(received, torch.tensor([7.0, 8.0, 9.0]), [1, 1, 1], [1, 1, 1]).wait()
    assert received.tolist() == [8.0, 8.0, 8.0]


@pytest.mark.parametrize("size", [4, 30_000, 300_000])
def test_scatter_input_of_rank_0_is_its_own_data(size):
    mine = torch.arange(float(size))
    begun = collective_calls.scatter(MirrorCollectives(1, 3), mine, None, 0)
    for act in begun.thens:
        act()
    assert mine.equal(torch.arange(float(size)))


@pytest.mark.parametrize("provisional", [True, False])
def test_objects_are_not_broadcast_while_the_world_is_provisional(monkeypatch, provisional):
    """torch's receiver would read a number of bytes from uninitialized memory."""
    runtime = create_autospec(WorkerRuntime, instance=True)
    runtime.provisional = provisional
    monkeypatch.setattr(lifecycle, "active", lambda: runtime)
    theirs = create_autospec(distributed.broadcast_object_list)
    monkeypatch.setitem(backend_override._theirs, "broadcast_object_list", theirs)
    objects = ["mine"]
    # torch's own argument names
    backend_override.broadcast_object_list(object_list=objects, src=0)
    assert objects == ["mine"]
    assert theirs.called is not provisional
