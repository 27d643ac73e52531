"""Collectives over several hosts, with parts that need neither memory of other processes nor a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic.collectives import threads_at_exit
from elastic.collectives.hierarchical import steps
from elastic.collectives.hierarchical.plan import Topology
from elastic.collectives.hierarchical.process_group import HierarchicalCollectives
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.shared_memory import arena
from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import CollectiveFailed
from harness.collectives_contract import FLOATS, LONGEST, CollectivesContract, small
from harness.fakes import collectives as fake
from harness.fakes.collectives import FakeCollectives
from harness.golden import raises

Hosts = Sequence[Sequence[int]]


class Afterwards:
    """A work whose result is put in place when it is waited for."""

    def __init__(self, work: Work, put: Callable[[], object]) -> None:
        self._work = work
        self._put = [put]

    def done(self) -> bool:
        return self._work.done()

    def within(self, timeout_s: float) -> bool:
        if not self._work.within(timeout_s):
            return False
        while self._put:
            self._put.pop()()
        return True

    def wait(self) -> None:
        self._work.wait()
        self.within(0.0)


class FakeHost(FakeCollectives):
    """One rank of a host, with the halves of an allreduce; they only take tensors that the real ones can. Halves in the
    other sense are summed in float32, as there.
    """

    scales_inside = True

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            return super().allreduce(tensor, op, scale, divisor)
        wide = tensor.float()
        return Afterwards(super().allreduce(wide, op, scale, divisor), lambda: tensor.copy_(wide))

    def share(self, elements: int, dtype: torch.dtype, rank: int | None = None) -> slice:
        owner = self.rank if rank is None else rank
        return slice(elements * owner // self.size, elements * (owner + 1) // self.size)

    def reduce_shares(
        self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1
    ) -> Work:
        assert shareable(tensor)
        total = tensor.clone()
        own = self.share(tensor.numel(), tensor.dtype)
        work = self.allreduce(total, op, scale, divisor)
        return Afterwards(work, lambda: tensor[own].copy_(total[own]))

    def spread_shares(self, tensor: torch.Tensor) -> Work:
        assert shareable(tensor)
        everything = [torch.empty_like(tensor) for _ in range(self.size)]

        def put() -> None:
            for rank, each in enumerate(everything):
                share = self.share(tensor.numel(), tensor.dtype, rank)
                tensor[share].copy_(each[share])

        return Afterwards(self.allgather(everything, tensor), put)


class FakeInterNodeGroup(FakeCollectives):
    def connect(self, store: object, purpose: str, bind_host: str) -> None:
        pass

    def look(self) -> None:
        pass


def shareable(tensor: torch.Tensor) -> bool:
    own = arena.mine()
    return own is not None and own.offset_of(tensor.data_ptr(), tensor.nbytes) is not None


def world_of(*hosts: Sequence[int]) -> list[HierarchicalCollectives]:
    size = sum(map(len, hosts))
    topology = [Topology(tuple(map(tuple, hosts)), rank) for rank in range(size)]
    shared = {each.local_ranks: fake._Shared(len(each.local_ranks), 10.0) for each in topology}
    wires = {
        each.inter_node_ranks: fake._Shared(len(each.inter_node_ranks), 10.0) for each in topology
    }
    groups = []
    for each in topology:
        alone = len(each.local_ranks) == 1
        host = LocalCollectives() if alone else FakeHost(each.index, shared[each.local_ranks])
        inter_node = (
            FakeInterNodeGroup(each.host, wires[each.inter_node_ranks])
            if each.inter_node_ranks
            else None
        )
        groups.append(HierarchicalCollectives(each, host, inter_node))
    return groups


def closed(world: Sequence[Collectives]) -> None:
    for group in world:
        group.abort()
    for group in world:
        group.close()


class Contract(CollectivesContract):
    """With chunks so small that a thousand elements need several."""

    hosts: Hosts
    longest = 5000  # at least 5 chunks: more than are in progress at once

    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch):
        monkeypatch.setattr(steps, "SHARE_BYTES", 512)
        monkeypatch.setattr(steps, "LEADER_BYTES", 512)
        monkeypatch.setattr(steps, "SMALL_BYTES", 64)

    def make(self) -> list[Collectives]:
        return list(world_of(*self.hosts))

    @pytest.mark.nightly
    @pytest.mark.parametrize("dtype", [torch.int8, torch.float64], ids=str)
    def test_sums_in_thousands_of_chunks_are_exact(self, world, dtype):
        self.is_exact(world, dtype, Op.SUM, (0, 1, 7, 1000, LONGEST))

    def test_tensors_inside_and_outside_of_the_arena_are_reduced_together(self, world):
        for dtype in (torch.int16, *FLOATS):
            self.is_reduced_together(world, dtype)

    def is_reduced_together(self, world, dtype):
        def reduced(group):
            results = []
            for length in (3, 5000):
                tensor = small(group.rank, length, dtype)
                if group.rank % 2:
                    inside = arena.zeros(length + 3, dtype)[3:]
                    tensor = inside.copy_(tensor)
                group.allreduce(tensor, Op.SUM).wait()
                results.append(tensor.double())
            return results

        for results in self.on_all(world, reduced):
            for result in results:
                inputs = [small(r, len(result), torch.float64) for r in range(len(world))]
                assert torch.equal(result, torch.stack(inputs).sum(0)), dtype


@pytest.mark.slow
class TestTwoHostsOfTwo(Contract):
    hosts = ((0, 1), (2, 3))

    def test_sums_in_a_thousand_chunks_are_exact(self, world):
        self.is_exact(world, torch.float64, Op.SUM, (LONGEST,))


@pytest.mark.nightly
class TestTwoHostsOfFour(Contract):
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.nightly
class TestThreeHostsWhoseRanksWereDealtOutInTurn(Contract):
    hosts = ((0, 3), (1, 4), (5, 2))


@pytest.mark.nightly
class TestThreeAndOne(Contract):
    hosts = ((0, 1, 2), (3,))


@pytest.mark.nightly
class TestOneTwoAndThree(Contract):
    hosts = ((4,), (0, 5), (1, 2, 3))


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]], ids=str)
@pytest.mark.parametrize("last", range(4))
def test_no_rank_passes_a_barrier_before_all_ranks_have_arrived(hosts, last):
    world = world_of(*hosts)
    works = [group.barrier() for group in world if group.rank != last]
    for work in works:
        assert not work.within(0.02)
    world[last].barrier().wait()
    for work in works:
        work.wait()
    closed(world)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0], [1, 2, 3]]], ids=str)
def test_abort_of_one_rank_ends_collectives_on_all_hosts(hosts):
    for lost in range(4):
        world = world_of(*hosts)
        waiting = [group.barrier() for group in world if group.rank != lost]
        world[lost].abort()
        for work in waiting:
            with pytest.raises(CollectiveFailed):
                work.wait()
        assert all(group.drain(10.0) for group in world)
        closed(world)


def test_collectives_queued_behind_a_failed_one_fail():
    world = world_of([0, 1], [2, 3])
    works = [world[0].barrier() for _ in range(3)]
    world[0].abort()
    for work in works:
        with pytest.raises(CollectiveFailed):
            work.wait()
        assert work.done()
    closed(world)


def test_error_in_the_middle_of_a_collective_ends_the_collective_on_all_ranks():
    world = world_of([0, 1], [2, 3])

    def exchanged(group: Collectives) -> str:
        rows = torch.ones(4)
        sent = [9, 9, 9, 9] if group.rank == 0 else [1, 1, 1, 1]  # more rows than it has
        with pytest.raises(CollectiveFailed) as failed:
            group.alltoall(torch.empty(4), rows, [1, 1, 1, 1], sent).wait()
        return str(failed.value)

    with ThreadPoolExecutor(4) as pool:
        assert "split" in next(pool.map(exchanged, world))
    closed(world)


def test_thread_finish_returns_in_time_despite_a_stuck_collective():
    world = world_of([0, 1], [2, 3])
    for work in [group.barrier() for group in world]:
        work.wait()
    assert threads_at_exit.finish(5.0)
    stuck = world[0].barrier()
    assert threads_at_exit.finish(0.3)
    assert not stuck.done()


def test_a_forked_child_raises_instead_of_waiting_for_the_parents_thread():
    world = world_of([0, 1], [2, 3])
    group = world[0]
    work = group.barrier()
    group.close_in_forked_child()
    with raises(CollectiveFailed):
        work.wait()
    with raises(CollectiveFailed):
        group.barrier()
    assert group.drain(0.0)
    closed(world[1:])


# ---- order -----------------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_start_collectives_in_the_same_order_for_any_speed_of_lanes(monkeypatch):
    monkeypatch.setattr(steps, "SHARE_BYTES", 512)
    monkeypatch.setattr(steps, "SMALL_BYTES", 64)
    world = world_of([0, 1], [2, 3])
    started: dict[int, list[str]] = {rank: [] for rank in range(4)}
    held = threading.Event()

    def noting(rank: int, join: Callable[..., Work]) -> Callable[..., Work]:
        def noted(kind: str, *arguments: object) -> Work:
            started[rank].append(kind)
            return join(kind, *arguments)

        return noted

    for group in world:
        host = group._host
        assert isinstance(host, FakeHost)
        monkeypatch.setattr(host, "_join", noting(group.rank, host._join))
    inter_node = world[3]._inter_node
    assert isinstance(inter_node, FakeInterNodeGroup)
    through = inter_node._join

    def late(kind: str, *arguments: object) -> Work:
        held.wait(10.0)
        return through(kind, *arguments)

    monkeypatch.setattr(inter_node, "_join", late)
    with ThreadPoolExecutor(1) as pool:
        works = [group.allreduce(torch.ones(5000), Op.SUM) for group in world]
        pool.submit(held.set)
        for work in works:
            work.wait()
    assert started[0] == started[1] == started[2] == started[3]
    assert len(started[0]) > 10
    closed(world)
