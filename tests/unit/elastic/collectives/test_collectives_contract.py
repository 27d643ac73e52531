"""The contract on implementations that need no network; Gloo is in integration/test_gloo.py."""

from __future__ import annotations

import torch

from elastic.collectives.groups import group_factory
from elastic.collectives.interface import Collectives, Op
from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import CollectiveFailed
from harness import groups
from harness.collectives_contract import CollectivesContract
from harness.fakes import collectives as fake
from harness.golden import raises
from harness.ranks import store_to_be


class TestFake(CollectivesContract):
    longest = 10_000  # nothing is divided into pieces

    def make(self) -> list[Collectives]:
        return list(fake.world(3))

    def test_ranks_that_call_different_collectives_break_the_world(self, world):
        world[0].allreduce(torch.ones(3), Op.SUM)
        work = world[1].broadcast(torch.ones(3), 0)
        with raises(CollectiveFailed):
            work.wait()


class TestLocal(CollectivesContract):
    longest = 10_000

    def make(self) -> list[Collectives]:
        return [LocalCollectives()]


def connecting(size: int, device_type: str) -> group_factory.ConnectingGroup:
    store = group_factory.Store(store_to_be(), None, timeout_s=1.0)
    return groups.connecting(store, 0, size, timeout_s=1.0, device_type=device_type)


def test_group_of_one_needs_neither_store_nor_backend():
    assert isinstance(connecting(1, "meta").connect(), LocalCollectives)


def test_a_device_without_a_backend_is_refused():
    with raises(ValueError):
        connecting(2, "xpu")
