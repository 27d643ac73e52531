"""Collectives on Gloo: the contract, and sockets, peers and other groups when a group ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed

from elastic.collectives.gloo import sockets
from elastic.collectives.gloo.process_group import GlooCollectives
from elastic.collectives.groups.group_factory import ConnectingGroup, Store, listen
from elastic.collectives.interface import Collectives, Op, Work
from elastic.errors import CollectiveFailed, Differing
from elastic.protocol.messages import Address, ProtocolError
from harness import groups, ranks
from harness.collectives_contract import CollectivesContract
from harness.groups import TIMEOUT_S, World, wait_in_two_orders
from harness.program import stdout_of
from harness.ranks import Died, store_to_be
from harness.waiting import wait_until

WAKE_S = 10.0  # generous: measured are 1 to 20 ms


connecting = partial(groups.connecting, native=False)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(3)
    yield world
    world.close()


class TestGloo(CollectivesContract):
    @pytest.fixture
    def world(self) -> Iterator[list[Collectives]]:
        world = World(3)
        yield world.group()
        world.close()


def total(groups: list[Collectives], world: World) -> list[float]:
    def run(rank: int) -> float:
        tensor = torch.ones(1000) * (rank + 1)
        groups[rank].allreduce(tensor, Op.SUM).wait()
        return float(tensor[-1])

    return world.on_all(run)


# ---- what an abort leaves alone ----------------------------------------------------------------


def test_abort_of_one_group_does_not_affect_other_groups(world):
    named, gradients = world.group("named"), world.group("gradients")
    named[1].abort()
    with pytest.raises(CollectiveFailed):
        total(named, world)
    assert total(gradients, world) == [6.0, 6.0, 6.0]


def test_abort_does_not_close_sockets_of_the_user(world):
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=5)
        accepted, _ = server.accept()
        with client, accepted:
            groups = world.group()
            for group in groups:
                group.abort()
                group.close()
            client.sendall(b"still here")
            assert accepted.recv(100) == b"still here"
        with socket.create_connection(server.getsockname(), timeout=5):
            server.accept()[0].close()


def test_abort_does_not_affect_the_default_process_group_of_the_user(world):
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        groups = world.group()
        default = torch.distributed.group.WORLD
        for group in groups:
            group.abort()
            group.close()
        assert torch.distributed.group.WORLD is default
        tensor = torch.ones(3)
        torch.distributed.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    finally:
        torch.distributed.destroy_process_group()


def test_descriptors_are_closed_after_many_generations():
    def once(generation: int) -> None:
        world = World(3, generation)
        groups = world.group()
        assert total(groups, world) == [6.0, 6.0, 6.0]
        if generation % 2:
            groups[0].abort()
        world.close()

    once(0)
    before = len(os.listdir("/dev/fd"))
    for generation in range(1, 21):
        once(generation)
    wait_until(lambda: len(os.listdir("/dev/fd")) <= before, "the close of all descriptors", 5.0)


def test_programs_that_the_process_starts_inherit_no_socket(world):
    world.group()
    count = (
        "import os, stat\n"
        "fds = [int(fd) for fd in os.listdir('/dev/fd')]\n"
        "known = [fd for fd in fds if os.path.exists(f'/dev/fd/{fd}')]\n"
        "print(sum(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in known))"
    )
    shown = stdout_of(sys.executable, "-c", count, close_fds=False)
    own = sum(1 for _ in sockets._sockets())
    assert own >= 3
    # Python's own sockets never pass to a program, and Gloo's do not either.
    assert int(shown) == 0


# ---- connecting --------------------------------------------------------------------------------


def test_abort_ends_a_connect_that_waits_for_missing_ranks(world):
    attempt = connecting(world.stores[1], 1, 3)
    aborter = threading.Timer(0.05, attempt.abort)
    aborter.start()
    began = time.monotonic()
    with pytest.raises(CollectiveFailed, match="aborted"):
        attempt.connect()
    assert time.monotonic() - began < WAKE_S
    aborter.join()


def test_abort_before_the_connect_fails_the_connect(world):
    attempt = connecting(world.stores[1], 1, 3)
    attempt.abort()
    with pytest.raises(CollectiveFailed, match="aborted"):
        attempt.connect()


def test_aborting_the_store_ends_an_exchange(world):
    store = world.stores[2]
    aborter = threading.Timer(0.05, store.abort)
    aborter.start()
    began = time.monotonic()
    with pytest.raises(CollectiveFailed) as caught:
        store.exchange("x", 2, 3, b"")
    assert caught.value.aborted and caught.value.awaited == "x"
    assert time.monotonic() - began < WAKE_S
    aborter.join()


def test_a_missing_rank_ends_the_connect_at_the_timeout(world):
    attempt = connecting(world.stores[0], 0, 3, timeout_s=0.2)
    world.stores[0]._timeout_s = 0.2
    with pytest.raises(CollectiveFailed) as caught:
        attempt.connect()
    assert caught.value.awaited == "named/3" and not caught.value.aborted


def test_a_late_rank_is_waited_for_as_long_as_in_a_collective(world):
    """And not as long as it takes to connect: it may save a checkpoint before its first collective."""

    def connect(rank: int) -> Collectives:
        if rank == 2:
            time.sleep(0.6)
        stores[rank]._timeout_s = 0.2
        made = connecting(stores[rank], rank, 3, timeout_s=0.2, collective_timeout_s=TIMEOUT_S)
        return made.connect()

    stores = world.stores
    world.groups += world.on_all(connect)
    assert total(world.groups, world) == [6.0] * 3


def test_abort_during_the_wait_for_a_late_rank_raises_and_leaves_no_thread(world):
    before = set(threading.enumerate())
    attempt = connecting(world.stores[0], 0, 3, collective_timeout_s=1000.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attempt.connect)
        wait_until(lambda: asks(set(threading.enumerate()) - before), "a group to be built", 10.0)
        attempt.abort()
        with pytest.raises(CollectiveFailed, match="aborted"):
            waiting.result(WAKE_S)
    assert set(threading.enumerate()) <= before


def asks(threads: set[threading.Thread]) -> bool:
    """Return whether one of the ranks, which connects a group, waits for the store's answer."""
    return any(stacked(each, "ask") for each in threads)


def stacked(thread: threading.Thread, function: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def test_an_unserved_store_is_retried_until_the_timeout():
    store = Store(store_to_be(), None, 0.2)
    with pytest.raises(CollectiveFailed) as caught:
        store.exchange("named", 1, 2, b"")
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_the_store_may_start_later_than_its_clients():
    address = store_to_be()
    early = Store(address, None, TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(early.exchange, "named", 1, 2, b"b")
        time.sleep(0.05)
        store = Store(address, listen(address.host, address.port), TIMEOUT_S)
        store.open()
        assert store.exchange("named", 0, 2, b"a") == [b"a", b"b"]
        assert found.result(5) == [b"a", b"b"]
    store.close()


def test_a_failed_fetch_from_the_store_gets_its_reason():
    def fails():
        raise ValueError("no rules yet")

    address = store_to_be()
    with contextlib.closing(Store(address, listen(address.host, address.port), TIMEOUT_S)) as store:
        store.provide("rules", fails)
        store.open()
        for _ in range(2):
            with pytest.raises(CollectiveFailed, match="ValueError: no rules yet"):
                store.fetch("rules", 0)


@pytest.mark.parametrize(
    ("generation", "secret"), [(2, b"secret"), (1, b"another")], ids=["generation", "secret"]
)
def test_store_refuses_other_generations_and_secrets(world, generation, secret):
    stranger = Store(world.stores[0].address, None, 1.0, generation=generation, secret=secret)
    with pytest.raises(CollectiveFailed) as caught:
        stranger.exchange("named", 0, 1, b"")
    assert isinstance(caught.value.__cause__, OSError | ProtocolError)
    groups = world.group()
    assert total(groups, world) == [6.0, 6.0, 6.0]


def test_the_store_survives_a_peer_that_sends_garbage(world):
    address = world.stores[0].address
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 100, b"\x00\x00\x00\x01" * 9):
        with socket.create_connection((address.host, address.port), timeout=5) as peer:
            peer.sendall(garbage)
    assert total(world.group(), world) == [6.0, 6.0, 6.0]


# ---- ranks that disagree -----------------------------------------------------------------------

ONES = torch.ones(1 << 18, dtype=torch.float32, device="cpu")

CALLS: dict[str, Callable[[Collectives], Work]] = {
    "small sum": lambda group: group.allreduce(ONES[:100].clone(), Op.SUM),
    "longer sum": lambda group: group.allreduce(ONES[:101].clone(), Op.SUM),
    "large sum": lambda group: group.allreduce(ONES.clone(), Op.SUM),
    "larger by one": lambda group: group.allreduce(ONES.new_ones(len(ONES) + 1), Op.SUM),
    "small maximum": lambda group: group.allreduce(ONES[:100].clone(), Op.MAX),
    "integers": lambda group: group.allreduce(ONES[:100].int(), Op.SUM),
    "from 0": lambda group: group.broadcast(ONES[:100].clone(), 0),
    "from 1": lambda group: group.broadcast(ONES[:100].clone(), 1),
    "much from 0": lambda group: group.broadcast(ONES.clone(), 0),
    "gather": lambda group: group.allgather(list(ONES.new_empty(3, 100)), ONES[:100]),
    "gather much": lambda group: group.allgather(list(ONES.new_empty(3, len(ONES))), ONES),
    "deal": lambda group: group.alltoall(ONES.new_empty(6), ONES[:6], [2] * 3, [2] * 3),
    "deal and take less": lambda group: group.alltoall(
        ONES.new_empty(5), ONES[:6], [2, 2, 1], [2] * 3
    ),
    "barrier": lambda group: group.barrier(),
}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("small sum", "longer sum"),
        ("longer sum", "small sum"),
        ("large sum", "larger by one"),
        ("larger by one", "large sum"),
        ("small sum", "large sum"),
        ("small sum", "small maximum"),
        ("small sum", "integers"),
        ("small sum", "from 0"),
        ("from 0", "from 1"),
        ("from 0", "much from 0"),
        ("gather", "gather much"),
        ("gather much", "large sum"),
        ("deal", "gather"),
        ("deal", "deal and take less"),
        ("barrier", "small sum"),
        ("barrier", "large sum"),
    ],
    ids=lambda named: named.replace(" ", "-"),
)
def test_different_collectives_raise_the_same_error_on_all_ranks(world, one, other):
    groups = world.group("differing")

    def differing(rank: int) -> Differing | None:
        groups[rank].allreduce(ONES.clone(), Op.SUM).wait()
        work = CALLS[other if rank == 1 else one](groups[rank])
        with pytest.raises(CollectiveFailed) as failed:
            work.wait()
        assert work.done()
        with pytest.raises(CollectiveFailed):
            groups[rank].barrier()
        return failed.value.differs

    told = world.on_all(differing)
    assert [(each.rank, each.size) for each in told] == [(0, 3), (1, 3), (2, 3)]
    assert len({each.key for each in told}) == 1


def test_calls_of_all_sizes_can_be_waited_for_by_several_threads_in_any_order(world):
    groups = world.group("order")

    def wrong(rank: int) -> list[int]:
        pick, tensors, works = random.Random(rank), [], []
        for call in range(90):
            elements = 1 + (call * 7919) % (300_000 if call % 5 == 0 else 3000)
            tensors.append(torch.full((elements,), float(rank + call)))
            works.append(groups[rank].allreduce(tensors[-1], Op.SUM))
            works[pick.randrange(len(works))].done()
        pick.shuffle(works)
        wait_in_two_orders(works)
        return [i for i, tensor in enumerate(tensors) if not (tensor == 3.0 * i + 3.0).all()]

    assert world.on_all(wrong) == [[]] * 3


def test_two_groups_complete_when_ranks_wait_for_them_in_different_orders(world):
    one, another = world.group("one"), world.group("another")

    def run(rank: int) -> list[float]:
        tensors = [ONES.clone(), ONES.clone()]
        works = [
            group[rank].allreduce(tensor, Op.SUM)
            for group, tensor in zip((one, another), tensors, strict=True)
        ]
        for work in works[::-1] if rank == 0 else works:
            assert work.within(TIMEOUT_S)
        return [float(tensor[-1]) for tensor in tensors]

    assert world.on_all(run) == [[3.0, 3.0]] * 3


def test_completed_work_holds_no_tensor(world):
    groups = world.group("held")

    def held(rank: int) -> bool:
        tensor = torch.ones(100)
        known, work = weakref.ref(tensor), groups[rank].allreduce(tensor, Op.SUM)
        work.wait()
        del tensor
        return work.done() and known() is not None

    assert world.on_all(held) == [False] * 3


# ---- peers that are lost -----------------------------------------------------------------------


three = ranks.fixture(3, "function")


def lose_a_peer(rank: int, size: int, address: Address, end: int, child: bool) -> dict[str, float]:
    """Rank 2 ends itself by a signal in the middle of training; how long until the others know."""
    store = ranks.open_store(rank, address)
    attempt = connecting(store, rank, size)
    group = attempt.connect()
    tensor = torch.ones(100_000)
    for _ in range(3):
        group.allreduce(tensor, Op.SUM).wait()
    if rank == 2:
        # As a DataLoader's worker: it lives on and holds what it inherited.
        if child and os.fork() == 0:
            attempt.close_in_forked_child()
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), end)
    times = {"began": time.monotonic()}

    def cut() -> None:
        times["began"] = time.monotonic()
        group.abort()
        times["abort"] = time.monotonic() - times["began"]

    cutter = threading.Timer(0.3, cut)
    if end == signal.SIGSTOP:
        cutter.start()
    try:
        for _ in range(1000):
            group.allreduce(tensor, Op.SUM).wait()
        raise AssertionError("nothing failed")
    except CollectiveFailed:
        times["raised"] = time.monotonic() - times["began"]
    if end == signal.SIGSTOP:
        cutter.join()
    group.abort()
    began = time.monotonic()
    assert group.drain(WAKE_S)
    group.close()
    store.close()
    times["close"] = time.monotonic() - began
    return times


@pytest.mark.parametrize("child", [False, True], ids=["alone", "with a forked child"])
def test_a_killed_peer_is_noticed_at_once(three, child):
    (address,) = three.run(ranks.serve_stores, 1)[0]
    three.start(lose_a_peer, address, signal.SIGKILL, child)
    results = [three.result(rank) for rank in (0, 1)]
    assert child or isinstance(three.result(2), Died)
    for times in results:
        assert isinstance(times, dict), times
        print(
            f"raised after {times['raised'] * 1e3:.1f} ms, closed in {times['close'] * 1e3:.1f} ms"
        )
        assert times["raised"] < WAKE_S
        assert times["close"] < WAKE_S


def test_an_abort_ends_the_wait_for_a_stopped_peer(three):
    (address,) = three.run(ranks.serve_stores, 1)[0]
    three.start(lose_a_peer, address, signal.SIGSTOP, False)
    try:
        for rank in (0, 1):
            times = three.result(rank)
            assert isinstance(times, dict), times
            print(
                f"raised after {times['raised'] * 1e3:.1f} ms, closed in {times['close'] * 1e3:.1f} ms"
            )
            print(f"abort itself took {times['abort'] * 1e3:.1f} ms")
            assert times["raised"] < WAKE_S
            assert times["abort"] < WAKE_S
            assert times["close"] < WAKE_S
    finally:
        os.kill(three.pid(2), signal.SIGKILL)


def connect_and_abort(rank: int, size: int, addresses: list[Address]) -> float:
    """Aborts at every stage of connecting and of the first collectives; the longest time until that raised."""
    worst = 0.0
    for number, address in enumerate(addresses):
        store = ranks.open_store(rank, address, number)
        attempt = connecting(store, rank, size)
        aborted_at: list[float] = []

        def cut(attempt: ConnectingGroup = attempt, at: list[float] = aborted_at) -> None:
            at.append(time.monotonic())
            attempt.abort()

        aborter = threading.Timer(0.0005 * number, cut)
        aborter.start()
        try:
            group = attempt.connect()
            while True:
                group.allreduce(torch.ones(1000), Op.SUM).wait()
        except CollectiveFailed:
            failed_at = time.monotonic()
        aborter.join()  # it may have failed because a peer was faster
        worst = max(worst, failed_at - aborted_at[0])
        store.close()
    return worst


def test_abort_at_any_moment_of_a_connect_ends_the_connect(three):
    addresses = three.run(ranks.serve_stores, 30)[0]
    for worst in three.run(connect_and_abort, addresses):
        print(f"raised {worst * 1e3:.1f} ms after the abort at worst")
        assert worst < WAKE_S


def cut_in_the_middle(rank: int, size: int, addresses: list[Address]) -> float:
    """Cuts while two large allreduces are under way, again and again; the longest drain."""
    worst = 0.0
    for number, address in enumerate(addresses):
        store = ranks.open_store(rank, address, number)
        group = connecting(store, rank, size).connect()
        tensor = torch.ones(1_000_000)
        group.allreduce(tensor, Op.SUM).wait()
        cutter = threading.Timer(0.001 * number, group.abort)
        if rank == number % size:
            cutter.start()
        with pytest.raises(CollectiveFailed):
            while True:
                for work in [group.allreduce(tensor, Op.SUM) for _ in range(2)]:
                    work.wait()
        cutter.cancel()
        group.abort()
        began = time.monotonic()
        assert group.drain(WAKE_S)
        worst = max(worst, time.monotonic() - began)
        group.close()
        store.close()
    return worst


def test_an_abort_in_the_middle_of_allreduces_is_drained_at_once(three):
    # One work in twenty loses its wake-up here, and one in sixty leaves a connection open.
    addresses = three.run(ranks.serve_stores, 25)[0]
    for worst in three.run(cut_in_the_middle, addresses):
        print(f"drained {worst * 1e3:.1f} ms after the cut at worst")
        assert worst < WAKE_S / 4


def test_drain_returns_when_gloo_is_deadlocked(world, monkeypatch):
    """Seen once after a cut: a receive with a timeout of a millisecond never came back."""
    group, locked = world.group()[0], threading.Event()
    assert isinstance(group, GlooCollectives)
    monkeypatch.setattr(group, "_time_out", locked.wait)
    stuck = create_autospec(torch.distributed.Work, instance=True)
    stuck.is_completed.return_value = False
    group._under_way.append(stuck)
    drain = threading.Thread(target=group.drain, args=(0.1,), daemon=True)
    drain.start()
    drain.join(WAKE_S)
    assert not drain.is_alive()
    locked.set()
    group._under_way.remove(stuck)


def test_the_timeout_bounds_a_collective(world):
    groups = world.on_all(
        lambda rank: connecting(world.stores[rank], rank, 3, "short", timeout_s=0.3).connect()
    )
    world.groups += groups
    began = time.monotonic()
    with pytest.raises(CollectiveFailed) as caught:
        groups[0].allreduce(torch.ones(1000), Op.SUM).wait()
    assert caught.value.late
    assert time.monotonic() - began < WAKE_S


@pytest.mark.parametrize(
    ("to_connect", "to_end", "least"),
    [(TIMEOUT_S, 0.3, 0.3), (0.3, 0.9, 0.9)],
    ids=["shorter", "longer"],
)
def test_a_collective_may_have_its_own_timeout(world, to_connect, to_end, least):
    groups = world.on_all(
        lambda rank: connecting(world.stores[rank], rank, 3, "own", to_connect, to_end).connect()
    )
    world.groups += groups
    began = time.monotonic()
    with pytest.raises(CollectiveFailed) as caught:
        groups[0].allreduce(torch.ones(1000), Op.SUM).wait()
    assert caught.value.late
    assert least <= time.monotonic() - began < least + WAKE_S


def test_torch_has_the_private_gloo_names_used_by_elastic():
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=1)
    options._threads = 2
    options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
