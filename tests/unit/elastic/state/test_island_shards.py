"""Ranks of an island as a world of their own, and the island that sends the outer parameters to others."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch

from elastic.protocol.messages import Place
from elastic.rendezvous import worker_settings
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.fully_sharded.island_shards import IslandReport, IslandRuntime, source_of

ANEW, FIRST = IslandReport(False, False, 0), IslandReport(True, False, 0)


def trained(merges: int) -> IslandReport:
    return IslandReport(True, True, merges)


@pytest.mark.parametrize(
    ("reports", "leaders", "source"),
    [
        ([FIRST, FIRST, FIRST], [0, 1, 2], 0),
        ([ANEW, ANEW, FIRST], [0, 2], 2),
        ([ANEW, trained(0), trained(0)], [0, 1, 2], 1),
        ([FIRST, trained(0)], [0, 1], 1),
        ([trained(3), trained(3), trained(4)], [0, 2], 2),
        ([ANEW, ANEW], [0, 1], None),
    ],
)
def test_island_with_the_most_merges_sends_the_outer_parameters(reports, leaders, source):
    assert source_of(reports, leaders) == source


def test_runtime_of_an_island_has_its_ranks_and_forms_groups_of_them():
    rt = create_autospec(WorkerRuntime, instance=True)
    rt.place, rt.generation = Place(5, 7, 0, 1, 5, 7), 3
    rt.env = worker_settings.read({})
    island = IslandRuntime(rt, [1, 4, 5])
    assert (island.place.rank, island.place.size) == (2, 3)
    cpu = torch.device("cpu")
    island.group("state", cpu)
    island.group("state", cpu, (0, 2))
    members = [call.args[2] for call in rt.group.call_args_list]
    assert members == [(1, 4, 5), (1, 5)]
