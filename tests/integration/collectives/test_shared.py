"""Collectives on shared memory: the contract, numbers, and groups whose ranks die, stop or leave."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from elastic.collectives.groups.group_factory import Store, listen
from elastic.collectives.interface import Op
from elastic.collectives.shared_memory import arena, native_library, peer_memory
from elastic.collectives.shared_memory.process_group import SharedCollectives
from elastic.errors import CollectiveFailed, TensorMismatch
from elastic.protocol.messages import Address
from harness import ranks, wording
from harness.collectives_contract import EVERY, FLOATS, INTEGERS, REFERENCE, CollectivesContract
from harness.forked import MARK, Forked
from harness.forking import WHOLE_END
from harness.groups import World, connecting, wait_in_two_orders
from harness.history import SCRIPTS
from harness.processes import clean_environment, path_of_tests
from harness.ranks import Died, Ranks
from stress.reductions.numbers import reduced

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=native_library.missing())

TIMEOUT_S = 30.0
ENDS_S = 90.0  # to import torch on a busy machine, and to end
WAKE_S = 10.0  # generous: measured are milliseconds
ENDS = SCRIPTS / "shared_ends.py"


def formed(
    store: Store, rank: int, size: int, purpose: str = "named", timeout_s: float = TIMEOUT_S
) -> SharedCollectives:
    group = connecting(store, rank, size, purpose, TIMEOUT_S, timeout_s).connect()
    assert isinstance(group, SharedCollectives)
    return group


# ---- all ranks in one process ------------------------------------------------------------------------------------


def world_of(size: int) -> World:
    made = World(size, native=True)
    assert all(isinstance(group, SharedCollectives) for group in made.group())
    return made


class TestShared(CollectivesContract):
    @pytest.fixture(params=[pytest.param(2, marks=pytest.mark.nightly), 3])
    def world(self, request: pytest.FixtureRequest) -> Iterator[list[SharedCollectives]]:
        made = world_of(request.param)
        yield made.groups
        made.close()


@pytest.fixture
def pair() -> Iterator[World]:
    made = world_of(2)
    yield made
    made.close()


def interrupt_after(call: Callable[..., int]) -> Callable[..., int]:
    """A signal's handler raises as soon as the call has returned, before its result has gone anywhere."""

    @functools.wraps(call)
    def interrupted(*arguments: object) -> int:
        call(*arguments)
        raise KeyboardInterrupt

    return interrupted


def test_tensor_of_an_interrupted_call_is_held_until_the_collective_completes(pair):
    """Native code still reads and writes the tensor, though the caller has no handle of it."""
    first, second = pair.groups
    tensor = torch.ones(3)
    found = first._library
    first._library = SimpleNamespace(elastic_allreduce=interrupt_after(found.elastic_allreduce))
    with pytest.raises(KeyboardInterrupt):
        first.allreduce(tensor, Op.SUM)
    first._library = found
    first.barrier()
    first.barrier()  # lets go of what is over
    assert any(held is tensor for _, held in first._held)
    for work in [second.allreduce(torch.ones(3), Op.SUM), second.barrier(), second.barrier()]:
        work.wait()
    last = first.barrier()
    second.barrier().wait()
    last.wait()
    assert tensor.tolist() == [2.0] * 3
    assert not any(held is tensor for _, held in first._held)


def test_a_reduction_into_other_memory_only_reads_the_tensor(pair):
    def reduced(rank: int) -> tuple[bool, bool]:
        tensor, result = torch.full((300_001,), rank + 1.0), torch.zeros(300_001)
        pair.groups[rank].allreduce_into(result, tensor, Op.SUM, 0.5).wait()
        return bool((result == 1.5).all()), bool((tensor == rank + 1.0).all())

    assert pair.on_all(reduced) == [(True, True)] * 2


def test_a_completed_tensor_is_released(pair):
    def reduced(rank: int) -> int:
        group = pair.groups[rank]
        group.allreduce(torch.ones(3), Op.SUM).wait()
        return len(group._held)

    assert pair.on_all(reduced) == [0, 0]


@pytest.mark.parametrize("windows", [1, 20])
def test_rank_waiting_for_buffer_space_is_not_reported_missing(windows):
    """Ranks 0 and 1 are as far ahead of rank 2 as they may be, in a broadcast or behind some."""
    world = world_of(3)
    works: list[Any] = []
    for _ in range(6):
        for group in world.groups[:2]:
            works.append(group.broadcast(torch.zeros(windows * (1 << 19), dtype=torch.uint8), 0))
        for work in works[-2:] * 2:
            work.within(0.05)
    assert [work.missing() for work in works[-2:]] == [[2], [2]]
    world.close()


def test_tensor_outside_of_the_arena_is_refused_and_not_held(pair):
    with pytest.raises(ValueError, match="arena"):
        pair.groups[0].reduce_shares(torch.ones(3), Op.SUM)
    assert not pair.groups[0]._held


def test_tensors_that_may_still_be_written_are_never_reused(pair):
    """Another rank was stopped in the middle of a chunk when the group was closed."""
    group = pair.groups[0]
    tensor = arena.zeros(1000, torch.float32)
    died = weakref.ref(tensor)
    group.allreduce(tensor, Op.SUM)
    group._native.drain = lambda timeout_s: False
    group.close()
    del group, tensor
    pair.groups[0] = pair.groups[1]
    gc.collect()
    assert died() is not None


# ---- messages ----------------------------------------------------------------------------------------------------


def test_message_completes_when_received_although_an_earlier_one_is_pending(pair):
    """The sender may end then, although an earlier message is still without a receive."""
    first, second = pair.groups
    early, late = (first.send(torch.full((3,), value), 1, tag=int(value)) for value in (5.0, 7.0))
    assert not late.within(0.0)
    got = torch.zeros(3)
    arrived = second.receive(got, None, tag=7)
    arrived.wait()
    late.wait()
    first.abort()
    early.wait()
    second.receive(before := torch.zeros(3), 0, tag=5).wait()
    assert (arrived.source, got.tolist(), before.tolist()) == (0, [7.0] * 3, [5.0] * 3)
    assert not first._messages
    assert not second._messages


def test_messages_of_any_length_cross(pair):
    sizes = [0, 1, 63, 300_000, 3_000_001]

    def swapped(rank: int) -> list[float]:
        group, other = pair.groups[rank], 1 - rank
        got = [torch.zeros(size) for size in sizes]
        works = [group.receive(each, other, 0) for each in got]
        works += [group.send(torch.full((size,), rank + 1.0), other, 0) for size in sizes]
        for work in works:
            work.wait()
        return [float(each.mean()) for each in got[1:]]

    assert pair.on_all(swapped) == [[2.0] * 4, [1.0] * 4]


def test_messages_end_with_a_deadline_an_abort_or_the_wrong_length(pair):
    first, second = pair.groups
    first.timeout_s = 0.05
    with pytest.raises(CollectiveFailed) as caught:
        first.receive(torch.zeros(3), 1, 0).wait()
    assert caught.value.rank == 1
    with pytest.raises(CollectiveFailed) as again:
        first.send(torch.zeros(3), 1, 0)
    assert str(again.value) == str(caught.value)
    waiting = second.receive(torch.zeros(3), None, 0)
    with pytest.raises(CollectiveFailed) as caught:
        waiting.wait()
    assert caught.value.aborted and caught.value.rank == 0
    assert waiting.done()
    longer = world_of(2)
    longer.groups[0].send(torch.zeros(4), 1, 0)
    with pytest.raises(TensorMismatch):
        longer.groups[1].receive(torch.zeros(3), 0, 0).wait()
    longer.close()


# ---- processes that stay ------------------------------------------------------------------------------------------


staying = ranks.fixture(3)


@pytest.fixture
def mortal() -> Iterator[Ranks]:
    mortal = Ranks(3)
    yield mortal
    mortal.kill()
    mortal.close()


@contextlib.contextmanager
def joined(
    rank: int, size: int, address: Address, timeout_s: float = TIMEOUT_S
) -> Iterator[SharedCollectives]:
    """In the group of all ranks, until all have left it or it failed."""
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size, timeout_s=timeout_s)
    try:
        yield group
        with contextlib.suppress(CollectiveFailed):
            group.barrier().wait()
    finally:
        group.abort()
        group.close()
        store.close()


def drawn(rank: int, elements: int, dtype: torch.dtype, op: Op) -> torch.Tensor:
    """The same on every rank for the same arguments."""
    generator = torch.Generator().manual_seed(elements * 10 + rank)
    if dtype.is_floating_point:
        numbers = torch.randn(elements, generator=generator, dtype=torch.float64)
        return (numbers.abs() + 0.5 if op is Op.PRODUCT else numbers).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (elements,), generator=generator).to(dtype)


def placed(tensor: torch.Tensor, inside: bool) -> torch.Tensor:
    return arena.zeros(len(tensor), tensor.dtype).copy_(tensor) if inside else tensor.clone()


PLACES = {
    "outside": lambda rank: False,
    "inside": lambda rank: True,
    "both": lambda rank: rank == 1,
}


def reduce_all(rank: int, size: int, address: Address, where: str, dtype: torch.dtype) -> list[str]:
    wrong = []
    with joined(rank, size, address) as group:
        for op in REFERENCE:
            for elements in (1, 63, 1000, 65_537, 300_001):
                inputs = [drawn(r, elements, dtype, op) for r in range(size)]
                for scale, divisor in ((1.0, 1), (1 / 3, 1), (1.0, 3), (1.0, 4)):
                    tensor = placed(inputs[rank], PLACES[where](rank))
                    group.allreduce(tensor, op, scale, divisor).wait()
                    if not torch.equal(tensor, reduced(inputs, op, scale, divisor)):
                        wrong.append(f"{op.name} of {elements}, times {scale} over {divisor}")
    return wrong


PLACES_AND_DTYPES = [
    # "both" has every dtype in either place.
    pytest.param(
        where,
        dtype,
        id=f"{where}-{dtype}",
        marks=()
        if where == "both" or dtype in (torch.int64, torch.float16)
        else pytest.mark.nightly,
    )
    for where in PLACES
    for dtype in (*INTEGERS, *FLOATS)
]


@pytest.mark.parametrize(("where", "dtype"), PLACES_AND_DTYPES)
def test_sums_are_exact_to_the_last_bit_for_any_memory_location(staying, where, dtype):
    (address,) = staying.run(ranks.serve_stores)[0]
    assert staying.run(reduce_all, address, where, dtype) == [[], [], []]


def move_all(rank: int, size: int, address: Address) -> list[str]:
    wrong = []
    with joined(rank, size, address) as group:
        for dtype in EVERY:
            for elements in (0, 1, 1000, 131_073, 700_001):
                inputs = [((torch.arange(elements) + r) % 2).to(dtype) for r in range(size)]
                for root in range(size):
                    tensor = inputs[rank].clone()
                    group.broadcast(tensor, root).wait()
                    if not torch.equal(tensor, inputs[root]):
                        wrong.append(f"broadcast of {elements} {dtype} from {root}")
                outputs = [torch.empty(elements, dtype=dtype) for _ in range(size)]
                group.allgather(outputs, inputs[rank]).wait()
                if not all(map(torch.equal, outputs, inputs)):
                    wrong.append(f"allgather of {elements} {dtype}")
                # Rank r sends its numbers (r + to) % 3 times to each.
                sent = [elements * ((rank + to) % 3) for to in range(size)]
                received = [elements * ((origin + rank) % 3) for origin in range(size)]
                output = torch.empty(sum(received), dtype=dtype)
                group.alltoall(output, inputs[rank].repeat(3), received, sent).wait()
                parts = [inputs[origin].repeat(3)[: received[origin]] for origin in range(size)]
                if rank == 0 and not torch.equal(output, torch.cat(parts)):
                    wrong.append(f"alltoall of {elements} {dtype}")
    return wrong


def test_moves_of_any_size_transfer_every_byte(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    assert staying.run(move_all, address) == [[], [], []]


def start_ahead(rank: int, size: int, address: Address) -> list[int]:
    """Waits for some in another order, from two threads, and for others not at all. Which of them are wrong."""
    pick = random.Random(rank)
    with joined(rank, size, address) as group:
        tensors, works = [], []
        for call in range(120):
            elements = 1 + (call * 7919) % (300_000 if call % 10 == 0 else 3000)
            tensor = placed(torch.full((elements,), float(rank + call)), pick.random() < 0.5)
            work = group.allreduce(tensor, Op.SUM)
            tensors.append(tensor)
            if call % 3:
                works.append(work)
            del work, tensor
        pick.shuffle(works)
        wait_in_two_orders(works)
        group.barrier().wait()
        return [
            call
            for call, tensor in enumerate(tensors)
            if not (tensor == sum(r + call for r in range(size))).all()
        ]


def test_collectives_may_be_started_ahead_and_their_handles_discarded(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    assert staying.run(start_ahead, address) == [[], [], []]


def drop_tensors(rank: int, size: int, address: Address) -> list[float]:
    """No reference to the running call is left; then the memory is allocated again."""
    with joined(rank, size, address) as group:
        if rank == 2:
            time.sleep(0.05)  # or it would be over before the others drop it
        for _ in range(20):
            group.allreduce(arena.zeros(100_000, torch.float32).fill_(1.0), Op.SUM)
            group.allreduce(torch.ones(100_000), Op.SUM)
            group.broadcast(torch.ones(100_000), 0)
        later = [arena.zeros(100_000, torch.float32) for _ in range(20)]
        group.barrier().wait()
        return [float(tensor.abs().sum()) for tensor in later]


def test_dropped_tensors_in_flight_are_not_reused_before_completion(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    assert staying.run(drop_tensors, address) == [[0.0] * 20] * 3


def work_side_by_side(rank: int, size: int, address: Address) -> list[float]:
    store = ranks.open_store(rank, address)
    groups = [formed(store, rank, size, f"number {number}") for number in range(4)]

    def train(number: int) -> float:
        tensor = placed(torch.ones(200_000), number % 2 == 0)
        try:
            for call in range(30):
                if (number, rank, call) == (3, 1, 10):
                    groups[number].abort()
                groups[number].allreduce(tensor, Op.SUM, 1 / size).wait()
        except CollectiveFailed:
            return -1.0
        groups[number].barrier().wait()
        return float(tensor.sum())

    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(train, range(4), timeout=TIMEOUT_S))
    for group in groups:
        group.abort()
        group.close()
    store.close()
    return sums


def test_groups_work_concurrently_and_an_abort_ends_only_one(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    assert staying.run(work_side_by_side, address) == [[200_000.0] * 3 + [-1.0]] * 3


def keep_works(rank: int, size: int, address: Address) -> tuple[int, int, list[str]]:
    """Return the remains of a closed group whose works are kept, and the state of these."""
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size)
    finished = group.allreduce(torch.ones(1000), Op.SUM)
    finished.wait()
    store.exchange("finished", rank, size, b"")
    unfinished = [group.allreduce(torch.ones(1000), Op.SUM)] if rank == 0 else []
    store.exchange("started", rank, size, b"")
    group.abort()
    group.close()
    store.close()
    peer_memory.sweep()
    controls = Path("/proc/self/maps").read_text().count("elastic-control")
    used = sum(mapped.users for mapped in peer_memory._open.values())
    said = []
    for work in (finished, *unfinished):
        assert work.done()
        try:
            work.wait()
            said.append("finished")
        except CollectiveFailed as failed:
            said.append(str(failed))
    assert group.drain(0.0)
    with pytest.raises(CollectiveFailed):
        group.barrier()
    return controls, used, said


def test_closed_group_keeps_no_mapping_while_works_are_referenced(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    (*nothing, (finished, aborted)), *others = staying.run(keep_works, address)
    assert nothing == [0, 0]
    assert finished == "finished"
    assert "aborted" in aborted  # by whoever came first
    assert others == [(0, 0, ["finished"])] * 2


def live_through(rank: int, size: int, addresses: list[Address]) -> list[dict[str, int]]:
    """Return what this process holds after the first generations, and after the last."""

    def held() -> dict[str, int]:
        gc.collect()
        peer_memory.sweep()
        mine = arena.mine()
        assert mine is not None
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": Path("/proc/self/maps").read_text().count("memfd:elastic"),
            "threads": len(os.listdir("/proc/self/task")),
            "lent": mine.lent,
        }

    seen = []
    for generation, address in enumerate(addresses):
        store = ranks.open_store(rank, address)
        group = formed(store, rank, size)
        works = [group.allreduce(placed(torch.ones(50_000), i % 2 == 0), Op.SUM) for i in range(4)]
        if generation % 3 == 0:
            group.barrier().wait()
        if generation % 3 == 2 and rank == generation % size:
            group.abort()
        with contextlib.suppress(CollectiveFailed):
            works[-1].wait()
            group.barrier().wait()
        group.abort()
        assert group.drain(WAKE_S)
        group.close()
        store.close()
        del group, works
        if generation in (9, len(addresses) - 1):
            seen.append(held())
    return seen


def test_two_hundred_generations_leak_no_thread_and_no_descriptor(staying):
    addresses = staying.run(ranks.serve_stores, 200)[0]
    for early, late in staying.run(live_through, addresses):
        assert late.pop("threads") <= early.pop("threads") + 1  # one that is just ending
        assert late.pop("descriptors") <= early.pop("descriptors")
        assert late == early


def come_late(rank: int, size: int, address: Address) -> tuple[bool, int | None] | None:
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size, timeout_s=0.3)
    said = None
    if rank != 1:
        with pytest.raises(CollectiveFailed) as failed:
            group.allreduce(torch.ones(100), Op.SUM).wait()
        said = failed.value.late, failed.value.rank
    while not said and not group._library.elastic_status(group._native.handle):
        time.sleep(0.01)  # until the others have given this rank up
    group.abort()
    group.close()
    store.close()
    return said


def test_a_missing_rank_is_named(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    said = staying.run(come_late, address)
    assert said[0] == said[2] == (True, 1)


def call_another(rank: int, size: int, address: Address) -> tuple[bool, int | None]:
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size)
    with pytest.raises(CollectiveFailed) as failed:
        group.allreduce(torch.ones(100 + rank // 2), Op.SUM).wait()
    group.close()
    store.close()
    return failed.value.differs is not None, failed.value.rank


def test_ranks_that_disagree_get_an_error(staying):
    (address,) = staying.run(ranks.serve_stores)[0]
    for found in staying.run(call_another, address):
        assert found == (True, 2)


class Rung(Exception):
    pass


def interrupt_a_wait(rank: int, size: int, address: Address, raises: bool) -> list[float]:
    """The others come only once the handler of rank 0's signal has run, in the middle of its wait."""
    store = ranks.open_store(rank, address)
    group, go = formed(store, rank, size), formed(store, rank, size, "go")
    tensor = torch.ones(10)
    if rank == 0:

        def ring(*_: object) -> None:
            go.barrier()
            if raises:
                raise Rung

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        work = group.allreduce(tensor, Op.SUM)
        if raises:
            with pytest.raises(Rung):
                work.wait()
        work.wait()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    else:
        go.barrier().wait()
        group.allreduce(tensor, Op.SUM).wait()
    group.barrier().wait()
    for each in (group, go):
        each.abort()
        each.close()
    store.close()
    return tensor.tolist()


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_signal_handler_runs_during_a_wait_without_affecting_results(staying, raises):
    def on_the_main_thread(rank: int, size: int) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert all(staying.run(on_the_main_thread))
    (address,) = staying.run(ranks.serve_stores)[0]
    assert staying.run(interrupt_a_wait, address, raises) == [[3.0] * 10] * 3


def fork_one(
    rank: int, size: int, address: Address, forgets: bool
) -> tuple[int, list[float], list[float]]:
    """Rank 1 has a child while its collective is under way, which tries everything that it must not do. The others come
    when it has ended.
    """
    store = ranks.open_store(rank, address)
    group, go = formed(store, rank, size), formed(store, rank, size, "go")
    inside, outside = placed(torch.ones(1000), True), torch.ones(1000)
    code = 0
    if rank != 1:
        go.barrier().wait()
    works = [group.allreduce(tensor, Op.SUM) for tensor in (inside, outside)]
    if rank == 1:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that hangs is a child that failed
            if forgets:
                group.close_in_forked_child()
            os._exit(try_all(group, works[0]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        go.barrier().wait()
    for work in works:
        work.wait()
    group.barrier().wait()
    for each in (group, go):
        each.abort()
        each.close()
    store.close()
    return code, inside.tolist(), outside.tolist()


def try_all(group: SharedCollectives, work: Any) -> int:
    """Return how many of the calls that can't run in a child raised nothing."""
    silent = 0
    calls: list[Callable[[], Any]] = [work.wait, functools.partial(work.within, 0.0), group.barrier]
    for call in calls:
        try:
            call()
            silent += 1
        except CollectiveFailed as failed:
            assert "forked child" in str(failed)
    work.done()
    group.abort()
    group.drain(0.0)
    group.close()
    return silent


@pytest.mark.parametrize("forgets", [True, False], ids=["told so", "untold"])
def test_collectives_continue_after_a_rank_has_forked_a_child(staying, forgets):
    (address,) = staying.run(ranks.serve_stores)[0]
    sums = [3.0] * 1000
    assert staying.run(fork_one, address, forgets) == [(0, sums, sums)] * 3


# ---- ranks that die or stop -----------------------------------------------------------------------------------------


def lose_one(rank: int, size: int, address: Address, early: bool) -> tuple[int | None, bool, bool]:
    """Rank 2 is killed before it comes, or by its own thread in the middle of large reductions."""
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size)
    tensor = placed(torch.ones(4 << 20), True)
    group.barrier().wait()
    if rank == 2:
        if early:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(CollectiveFailed) as failed:
        while True:
            group.allreduce(tensor, Op.SUM, 1 / size).wait()
    group.abort()
    drained = group.drain(WAKE_S)
    tensor.fill_(-1.0)
    group.close()
    store.close()
    return failed.value.ended, drained, bool((tensor == -1.0).all())


@pytest.mark.parametrize("early", [True, False], ids=["before it comes", "in the middle"])
def test_killed_rank_is_named_by_all_surviving_ranks(mortal, early):
    (address,) = mortal.run(ranks.serve_stores)[0]
    mortal.start(lose_one, address, early)
    for rank in (0, 1):
        assert mortal.result(rank) == (2, True, True)
    assert isinstance(mortal.result(2), Died)


def lose_a_sender(rank: int, size: int, address: Address, pid: int) -> tuple[float, int | None]:
    """Rank 2 is killed in the middle of its second message, which is too long for the memory between the ranks."""
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size)
    if rank == 2:
        for to in (0, 1):
            group.send(torch.ones(100), to, 0).wait()
            group.send(torch.ones(4 << 20), to, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    ended = os.pidfd_open(pid)
    group.receive(first := torch.zeros(100), 2, 0).wait()
    assert select.select([ended], [], [], WAKE_S)[0]
    os.close(ended)
    with pytest.raises(CollectiveFailed) as failed:
        group.receive(torch.zeros(4 << 20), None if rank else 2, 0).wait()
    group.close()
    store.close()
    return float(first.sum()), failed.value.ended


def test_a_killed_sender_is_named_by_the_receiver(mortal):
    (address,) = mortal.run(ranks.serve_stores)[0]
    mortal.start(lose_a_sender, address, mortal.pid(2))
    for rank in (0, 1):
        assert mortal.result(rank) == (100.0, 2)


def stop_one(rank: int, size: int, addresses: list[Address], pids: list[int]) -> list[bool]:
    """Rank 0 stops rank 2 again and again at any moment of a large reduction, and cuts the group. Whether it could say
    at once that nobody writes into its tensor; where it could, nobody did when rank 2 went on.
    """
    said = []
    pick = random.Random(1)
    for address in addresses:
        store = ranks.open_store(rank, address)
        group = formed(store, rank, size)
        tensor = placed(torch.ones(1 << 20), True)
        group.barrier().wait()
        work = group.allreduce(tensor, Op.SUM, 0.0)  # what is written is zeros
        for _ in range(3):
            work = group.allreduce(tensor, Op.SUM, 0.0)
        if rank == 0:
            time.sleep(pick.random() * 0.004)
            os.kill(pids[2], signal.SIGSTOP)
            while psutil.Process(pids[2]).status() != psutil.STATUS_STOPPED:
                time.sleep(0)
            cutter = threading.Thread(target=group.abort)
            cutter.start()
            with contextlib.suppress(CollectiveFailed):
                work.wait()  # it may be over
            cutter.join()
            said.append(group.drain(0.02))
            tensor.fill_(5.0)
            os.kill(pids[2], signal.SIGCONT)
            assert group.drain(WAKE_S)
            if said[-1]:
                assert (tensor == 5.0).all()
        else:
            with contextlib.suppress(CollectiveFailed):
                work.wait()
                group.barrier().wait()
            group.abort()
            assert group.drain(WAKE_S)
        group.close()
        store.close()
    return said


def test_a_drain_reports_whether_a_stopped_rank_may_write(mortal):
    addresses = mortal.run(ranks.serve_stores, 150)[0]
    pids = [mortal.pid(rank) for rank in range(3)]
    said = mortal.run(stop_one, addresses, pids)[0]
    assert len(said) == 150
    assert any(said), "it was always said that the stopped rank was in the middle of a chunk"
    assert not all(said), "it never was in the middle of a chunk"


def wait_for_a_stopped_one(rank: int, size: int, address: Address) -> bool:
    store = ranks.open_store(rank, address)
    group = formed(store, rank, size)
    group.barrier().wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return False
    tensor = torch.ones(1 << 20)
    work = group.allreduce(tensor, Op.SUM)
    assert work.within(0.2) is False
    cutter = threading.Timer(0.1, group.abort)
    cutter.start()
    with pytest.raises(CollectiveFailed):
        work.wait()
    cutter.join()
    drained = group.drain(0.0) or group.drain(WAKE_S)
    group.close()
    store.close()
    return drained


def test_an_abort_ends_the_wait_for_a_stopped_rank(mortal):
    (address,) = mortal.run(ranks.serve_stores)[0]
    mortal.start(wait_for_a_stopped_one, address)
    assert mortal.result(0) is True
    assert mortal.result(1) is True


# ---- programs that end ----------------------------------------------------------------------------------------------


def ended(how: str) -> list[tuple[int, str]]:
    """Exit code and all output of two ranks that end so."""
    listener = listen("127.0.0.1")
    socket = listener.socket.fileno()  # rank 0 inherits it: nobody else can take the port
    programs = [
        Forked(
            [sys.executable, str(ENDS), how, str(rank), str(listener.address.port), "3"],
            folder=Path.cwd(),
            env=clean_environment() | {WHOLE_END: "1"},
            mark=f"{MARK}={uuid.uuid4().hex}",
            passed=[socket] if rank == 0 else [],
        )
        for rank in range(2)
    ]
    listener.close()
    try:
        codes = [program.wait(ENDS_S) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [(code, program.printed()) for code, program in zip(codes, programs, strict=True)]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("under way", marks=pytest.mark.nightly),
        "under way in a cycle",
        "daemon waits",
        "forked child",
        pytest.param("last", marks=pytest.mark.nightly),
    ],
)
def test_program_exits_without_output(how):
    assert ended(how) == [(0, "done\n"), (0, "done\n")]


def test_short_reduction_stress_run_with_kills_and_freezes_has_no_findings(tmp_path):
    """A short one of what `python -m tests.stress reductions` does by the ten thousand."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "stress", "reductions", "--count", "60"]
    done = subprocess.run(
        [*command, "--seed", "5", "--json", str(report)],
        env=os.environ | path_of_tests(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert report.exists(), done.stdout
    said = json.loads(report.read_text())
    # How late an error may be on a busy machine is not this test's to say.
    said["findings"] = [each for each in said["findings"] if wording.MS_LATE not in each]
    assert said["findings"] == [], done.stdout
    assert said["wrong"] == 0
    assert said["groups"] == 60
    assert said["kills"] > 10
    assert said["freezes"] > 5
    assert said["results compared"] > 150
