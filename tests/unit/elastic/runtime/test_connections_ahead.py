"""Connections to the store of the next world, which a rank starts before it knows that world."""

from __future__ import annotations

import dataclasses
import threading
import time

import msgspec
import pytest

pytest.importorskip("torch")

from elastic.errors import CollectiveFailed
from elastic.protocol.messages import Address, Place, World
from elastic.protocol.pending_handshakes import count_limit
from elastic.rendezvous import store, worker_settings
from elastic.rendezvous.store import Call
from elastic.runtime import process_groups, store_connections
from elastic.runtime.process_groups import STORE, Groups

WAIT_S = 20.0


def enter(groups: list[Groups], generation: int) -> None:
    """Enter a world of ranks on distant hosts, and wait until they know the address of the next store."""
    address = groups[0].listen()
    for each in groups:
        each.connect_ahead()
        each.retire()
    for rank, each in enumerate(groups):
        place = Place(rank, len(groups), 0, 1, rank, len(groups))
        world = World(generation, place, address, len(groups), None, "a test")
        each.open(world, lambda reason: None)
    for thread in threading.enumerate():
        if thread.name == "elastic-next":
            thread.join(WAIT_S)


@pytest.mark.parametrize("stays", [True, False])
def test_requests_to_the_next_world_connect_only_when_rank_0_has_changed(stays, monkeypatch):
    # Closing waits for the threads of all Groups of a process, of which a worker has one.
    monkeypatch.setattr(process_groups, "CLOSE_S", 0.0)
    monkeypatch.setattr(process_groups, "_FORM_S", 0.0)
    env = dataclasses.replace(worker_settings.read({}), driver=Address("127.0.0.1", 1))
    first, second, third = (Groups(env, lambda: False) for _ in range(3))
    connects: list[bool] = []
    connect = Call.connect

    def watched(call, kept, *arguments):
        connects.append(kept is None)
        connect(call, kept, *arguments)

    try:
        enter([first, second, third], 1)
        monkeypatch.setattr(Call, "connect", watched)
        enter([first, second] if stays else [third, second], 2)
    finally:
        for each in (first, second, third):
            each.retire()
            each.close()
    assert connects == [not stays]


@pytest.fixture
def workers(monkeypatch):
    """Three workers that have entered no world yet."""
    monkeypatch.setattr(process_groups, "CLOSE_S", 0.0)
    monkeypatch.setattr(process_groups, "_FORM_S", 0.0)
    env = worker_settings.read({})
    found = [Groups(env, lambda: False) for _ in range(3)]
    yield found
    for each in found:
        each.retire()
        each.close()


def first_worlds(addresses: list[Address], *, known: bool = True) -> list[World]:
    """Return the message about world 1 to each member. With ``known``, each member's address is known."""
    metadata = [{STORE: msgspec.json.encode(each).decode()} for each in addresses]
    if not known:
        metadata[0] = {}
    places = [Place(rank, 3, 0, 1, rank, 3) for rank in range(3)]
    return [World(1, each, addresses[0], 3, None, "a test", metadata=metadata) for each in places]


@pytest.mark.parametrize("known", [True, False])
def test_group_without_rank_0_meets_at_its_first_rank_if_its_address_is_known(known, workers):
    addresses = [each.listen() for each in workers]
    worlds = first_worlds(addresses, known=known)
    formed: set[int] = set()

    def form(rank: int) -> None:
        workers[rank].open(worlds[rank], lambda reason: None)
        workers[rank].form(("island", "cpu", (1, 2)), 1, worlds[rank].place)
        formed.add(rank)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in (1, 2)]
    if not known:  # Otherwise, the other ranks do not need the store of rank 0.
        workers[0].open(worlds[0], lambda reason: None)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    following = [each.listen() for each in workers]
    assert formed == {1, 2}
    # A socket that serves a store of this world is not used for the next world.
    assert [a == b for a, b in zip(addresses, following, strict=True)] == [known, not known, True]


@pytest.fixture
def entered(workers):
    """Three workers in a world of which each member's address is known."""
    worlds = first_worlds([each.listen() for each in workers])
    for each, world in zip(workers, worlds, strict=True):
        each.open(world, lambda reason: None)
    return workers


def test_group_of_an_ended_world_does_not_take_the_socket_promised_for_the_next_world(entered):
    promised = entered[1].listen()
    with pytest.raises(CollectiveFailed):
        entered[1].form(("island", "cpu", (1, 2)), 1, Place(1, 3, 0, 1, 1, 3))
    assert entered[1].listen() == promised


def test_group_without_rank_0_is_wanted_once_another_rank_waits_for_it(entered):
    key = "island", "cpu", (1, 2)
    places = [Place(rank, 3, 0, 1, rank, 3) for rank in range(3)]
    threads = [threading.Thread(target=entered[1].form, args=(key, 1, places[1]), daemon=True)]
    threads[0].start()
    until = time.monotonic() + WAIT_S
    while not entered[2].wanted(key, 1, places[2]):
        assert time.monotonic() < until
    threads.append(threading.Thread(target=entered[2].form, args=(key, 1, places[2]), daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(each.find(key) is not None for each in entered[1:])


@pytest.mark.parametrize("descriptors", [1024, 4096])
@pytest.mark.parametrize("size", [2, 32, 64, store_connections.KEEPING_RANKS])
def test_connections_of_all_ranks_when_none_has_a_request_then_the_store_drops_none(
    size, descriptors
):
    each = store_connections.early_connections(size)
    kept = store_connections.kept_connections(size)
    # Each rank may also open one connection of its own for a first request.
    assert (each + 1) * (size - 1) < count_limit(store._REQUEST_LIMIT, descriptors)
    assert 1 <= each <= kept and kept * (size - 1) <= 1024 // 4
