"""Between distant hosts every round trip counts. These tests count them, so that none is added unnoticed: what a
recovery connects, it connects at once, and with one exchange for each group.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from elastic.collectives.groups import group_factory
from elastic.collectives.interface import Op
from elastic.collectives.shared_memory import native_library
from elastic.protocol import messages
from elastic.protocol.messages import Address, Place
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import Store
from elastic.runtime.process_groups import Groups
from harness import ranks
from harness.groups import connecting
from harness.ranks import Ranks

PURPOSES = ("named", "gradients")
WAIT_S = 20.0


three = ranks.fixture(3, "function")


class Counted:
    """Requests of this process to stores, by thread: two requests of a thread need two or more round trips."""

    def __init__(self) -> None:
        # By the thread itself: the number of one that has ended is given to the next.
        self.by_thread: dict[threading.Thread, list[str]] = {}
        exchange = Store.exchange

        def counting(store: Store, key: str, *arguments: Any, **named: Any) -> list[bytes]:
            self.by_thread.setdefault(threading.current_thread(), []).append(key)
            return exchange(store, key, *arguments, **named)

        Store.exchange = counting  # type: ignore[method-assign,assignment]


def address(rank: int, size: int) -> Address:
    if "groups" not in ranks.kept:
        ranks.kept["groups"] = Groups(worker_settings.read({"ELASTIC_NATIVE": "0"}), lambda: False)
    groups: Groups = ranks.kept["groups"]
    return groups.listen()


def enter(rank: int, size: int, generation: int, hosts: int, holders: int, store: Address) -> Place:
    """The next world, of one rank on each host, or of all on one."""
    cross = rank if hosts == size else 0
    place = Place(rank, size, rank - cross, size // hosts, cross, hosts)
    groups = ranks.kept["groups"]
    groups.retire()
    ranks.kept["counted"] = Counted()
    world = messages.World(generation, place, store, holders, None, "a test")
    groups.open(world, lambda reason: None)
    ranks.kept["place"] = place
    return place


def use(rank: int, size: int, generation: int) -> list[float]:
    """Connect everything for a step: both groups, and the connection to rank 0."""
    groups, place = ranks.kept["groups"], ranks.kept["place"]
    found = []
    for purpose in PURPOSES:
        group = groups.form((purpose, "cpu", tuple(range(size))), generation, place)
        tensor = torch.full((3,), float(rank))
        group.allreduce(tensor, Op.SUM).wait()
        found.append(float(tensor[0]))
    return found


def made_unasked(rank: int, size: int) -> tuple[list[str], list[list[str]]]:
    """The groups that there are, and what was asked for them, without anybody having asked for a group."""
    for each in threading.enumerate():
        if each.name in ("elastic-ahead", "elastic-reach"):
            each.join(WAIT_S)
    groups = ranks.kept["groups"]
    made = [each for each in PURPOSES if groups.find((each, "cpu", tuple(range(size))))]
    return made, sorted(ranks.kept["counted"].by_thread.values())


def state_group(rank: int, size: int, ranks_: tuple[int, ...]) -> bool:
    """Whether there is a group in which the state can be sent, without anybody having asked for it."""
    made_unasked(rank, size)
    return ranks.kept["groups"].find(("state", "cpu", ranks_)) is not None


def enter_all(three: Ranks, generation: int, hosts: int, holders: int = 3) -> None:
    where = three.run(address)[0]
    three.run(enter, generation, hosts, holders, where)


def test_groups_of_the_previous_world_are_connected_in_advance_with_one_exchange_each(three):
    enter_all(three, 1, hosts=3)
    assert three.run(made_unasked) == [([], [])] * 3  # nobody knows yet what will be used
    assert three.run(use, 1) == [[3.0, 3.0]] * 3
    enter_all(three, 2, hosts=3)
    made = three.run(made_unasked)
    groups = [["gradients/3"], ["named/3"]]
    assert made[0] == (list(PURPOSES), groups)
    assert made[1:] == [(list(PURPOSES), [*groups, ["negotiation"]])] * 2
    # One that has joined comes to a group that is there, as to one that others are forming.
    assert three.run(is_wanted, 2) == [True] * 3
    assert three.run(use, 2) == [[3.0, 3.0]] * 3


def test_state_group_is_connected_in_advance_with_one_exchange_when_ranks_are_on_several_hosts(
    three,
):
    enter_all(three, 1, hosts=3, holders=2)
    assert three.run(state_group, (0, 2)) == [True, False, True]
    _, asked = zip(*three.run(made_unasked), strict=True)
    # One that joins probably negotiates, too.
    state = ["state of 0,2/2"]
    assert asked == ([state], [], [["negotiation"], state])


def test_state_group_on_one_host_is_created_at_first_use(three):
    enter_all(three, 1, hosts=1, holders=2)
    assert three.run(state_group, (0, 2)) == [False] * 3


def is_wanted(rank: int, size: int, generation: int) -> bool:
    key = ("gradients", "cpu", tuple(range(size)))
    return bool(ranks.kept["groups"].wanted(key, generation, ranks.kept["place"]))


def test_groups_on_one_host_are_created_at_first_use(three):
    for generation in (1, 2):
        enter_all(three, generation, hosts=1)
        assert three.run(made_unasked) == [([], [])] * 3
        assert three.run(use, generation) == [[3.0, 3.0]] * 3


def share(rank: int, size: int, store: Address, apart: bool) -> tuple[str, float]:
    env = worker_settings.read({})
    listener = ranks.kept.pop("listener", None)
    held = Store(store, listener, WAIT_S, secret=env.secret)
    held.open()
    group = connecting(held, rank, size, apart=apart).connect()
    tensor = torch.full((3,), float(rank))
    group.allreduce(tensor, Op.SUM).wait()
    ranks.kept["held"] = (held, group)
    return type(group).__name__, float(tensor[0])


def serve(rank: int, size: int) -> Address:
    listener = group_factory.listen("127.0.0.1")
    if rank == 0:
        ranks.kept["listener"] = listener
    return listener.address


@pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())
def test_two_host_names_of_one_machine_share_memory(three):
    """The driver takes them for hosts of one rank each, so that these expect Gloo."""
    where = three.run(serve)[0]
    assert three.run(share, where, True) == [("SharedCollectives", 3.0)] * 3
