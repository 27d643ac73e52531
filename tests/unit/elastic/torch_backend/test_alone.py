"""torch.distributed's collectives in a world of one, which may be left after losses."""

from __future__ import annotations

import torch

from elastic.collectives.single_rank import LocalCollectives
from elastic.torch_backend import collective_calls
from elastic.torch_backend.collective_calls import CollectiveCall


def result(begun: CollectiveCall) -> None:
    for work in begun.works:
        work.wait()
    for then in begun.thens:
        then()


def test_tensors_of_several_dimensions_keep_their_shape():
    group, mine = LocalCollectives(), torch.arange(6.0).view(3, 2)
    gathered, turned, joined = torch.zeros(3, 2), torch.zeros(2, 3).t(), torch.zeros(1, 3, 2)
    result(collective_calls.allgather(group, [gathered], mine))
    result(collective_calls.allgather(group, [turned], mine))
    result(collective_calls.allgather_into(group, [joined], [mine]))
    swapped, listed = torch.zeros(3, 2), torch.zeros(3, 2)
    result(collective_calls.alltoall_rows(group, swapped, mine, [], []))
    result(collective_calls.alltoall(group, [listed], [mine]))
    collected, given = torch.zeros(3, 2), torch.zeros(3, 2)
    result(collective_calls.gather(group, [collected], mine, 0))
    result(collective_calls.scatter(group, given, [mine], 0))
    for each in (gathered, turned, joined[0], swapped, listed, collected, given):
        assert torch.equal(each, mine)
