"""Messages between ranks on both CPU backends: their order, and those that do not match their receive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.collectives.gloo.point_to_point import INLINE_BYTES
from elastic.collectives.shared_memory import native_library
from elastic.errors import Invalid, TensorMismatch
from harness.groups import World

LONG = INLINE_BYTES // 4 + 1  # float32 that do not travel with the header
SHARED = pytest.param(
    True,
    marks=pytest.mark.skipif(native_library.load() is None, reason=native_library.missing()),
    id="shared",
)


@pytest.fixture(params=[pytest.param(False, id="gloo"), SHARED])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(3, native=request.param)
    made.group("messages")
    yield made
    made.close()


def raised(message: Any) -> TensorMismatch:
    with pytest.raises(TensorMismatch) as info:
        message.wait()
    return info.value


@pytest.mark.parametrize(
    ("sent", "room"),
    [
        (torch.ones(5), torch.zeros(3)),
        (torch.ones(3), torch.zeros(5)),
        (torch.ones(5), torch.zeros(5, dtype=torch.int32)),
        (torch.ones(LONG), torch.zeros(3)),
        (torch.ones(3), torch.zeros(LONG)),
        (torch.ones(LONG + 1), torch.zeros(LONG)),
        (torch.ones(LONG), torch.zeros(LONG + 1)),
        (torch.ones(LONG), torch.zeros(LONG, dtype=torch.int32)),
        (torch.ones(0), torch.zeros(1)),
    ],
)
@pytest.mark.parametrize("anyone", [False, True])
def test_a_message_that_does_not_fit_names_both_tensors(world, sent, room, anyone):
    groups = world.groups

    def run(rank: int) -> Any:
        if rank == 1:
            return groups[1].send(sent, 2, 4)  # who drops it takes it back
        if rank != 2:
            return None
        return raised(groups[2].receive(room, None if anyone else 1, 4))

    error = world.on_all(run)[2]
    found = {call.rank: (call.name, call.tensors) for call in error.calls}
    of_sent, of_room = (f"{str(x.dtype).removeprefix('torch.')} [{len(x)}]" for x in (sent, room))
    assert found == {1: ("send", of_sent), 2: ("recv", of_room)}
    assert not room.any()


def test_messages_of_many_sizes_arrive_in_order_when_waits_are_in_reverse_order(world):
    counts = [1, LONG, 0, 3 * LONG, LONG, 7, LONG]
    groups = world.groups

    def run(rank: int) -> None:
        group, to, source = groups[rank], (rank + 1) % 3, (rank - 1) % 3
        calls = list(enumerate(itertools.product(counts, (0, 9))))
        works = [group.send(torch.full((count,), float(n)), to, tag) for n, (count, tag) in calls]
        places = [torch.empty(count) for _, (count, _) in calls]
        works += [
            group.receive(place, source, tag)
            for place, (_, (_, tag)) in zip(places, calls, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        for n, place in enumerate(places):
            assert bool((place == n).all())

    world.on_all(run)


def test_long_messages_from_any_rank_continue_during_other_waits_of_the_script(world):
    groups = world.groups

    def run(rank: int) -> set[float]:
        group = groups[rank]
        if rank:
            group.send(torch.full((LONG,), float(rank)), 0, 1).wait()
            group.receive(torch.empty(1), 0, 2).wait()
            return set()
        places = torch.empty(2, LONG)
        works = [group.receive(place, None, 1) for place in places]
        for other in (1, 2):  # they come to it once their long message has been received
            group.send(torch.empty(1), other, 2).wait()
        for work, place in reversed(list(zip(works, places, strict=True))):
            work.wait()
            assert bool((place == work.source).all())
        return {float(place[0]) for place in places}

    assert world.on_all(run)[0] == {1.0, 2.0}


def test_receive_from_a_given_rank_is_refused_over_gloo_when_any_rank_is_pending_under_its_tag():
    world = World(2)
    try:
        group = world.group("messages")[0]
        group.receive(torch.empty(LONG), None, 1)
        with pytest.raises(Invalid):
            group.receive(torch.empty(LONG), 1, 1)
        group.receive(torch.empty(LONG), 1, 2)
        group.receive(torch.empty(1), 1, 1)
    finally:
        world.close()
