"""Process sets: some ranks run collectives among themselves, in sets that may overlap; the other ranks can't."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works


@contextmanager
def added(*sets: list[int]) -> Iterator[Any]:
    """Register sets during the block, on all ranks."""
    made = [hvd.add_process_set(ranks) for ranks in sets]
    yield made[0] if len(made) == 1 else made
    for each in made:
        assert hvd.remove_process_set(each) is True


@everywhere()
def test_global_process_set_contains_all_ranks(rank, size):
    everybody = hvd.global_process_set
    assert everybody.process_set_id == 0
    assert list(everybody.ranks) == list(range(size))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (size, rank, True)
    tensor = torch.ones(1)
    assert hvd.allreduce(tensor, op=hvd.Sum, process_set=everybody).item() == size


@everywhere(3, 4)
def test_process_set_reports_its_ranks_and_number(rank, size):
    made = hvd.ProcessSet([0, size - 1])
    assert "process_set_id=None" in repr(made), "not registered yet"
    assert hvd.add_process_set(made) is made
    number = made.process_set_id
    assert number is not None and number > 0
    assert list(made.ranks) == [0, size - 1]
    assert made.size() == 2
    assert made.included() == (rank in (0, size - 1))
    if made.included():
        assert made.rank() == (0 if rank == 0 else 1)
    numbers = hvd.allgather(torch.tensor([number]))
    assert len(set(numbers.tolist())) == 1, "one number on all ranks"
    assert hvd.remove_process_set(made) is True
    assert made.process_set_id is None
    with raises(ValueError):
        hvd.allreduce(torch.ones(1), process_set=made)
    works(size)


@everywhere(3, 4)
def test_every_collective_runs_within_a_process_set(rank, size):
    members = [0, size - 1]
    with added(members) as some:
        if rank in members:
            index, total = members.index(rank), sum(members)
            own = torch.full((2, 2), float(rank))
            for name in (None, "some"):
                result = hvd.allreduce(own, op=hvd.Sum, name=name, process_set=some)
                assert (result == total).all()
                assert (hvd.allreduce(own, name=name, process_set=some) == total / 2).all()
            a, b = hvd.grouped_allreduce([own, own + 1], op=hvd.Sum, process_set=some)
            assert (a == total).all() and (b == total + 2).all()
            kept = own.clone()
            assert hvd.allreduce_(kept, op=hvd.Max, process_set=some) is kept
            assert (kept == size - 1).all()
            rows = hvd.allgather(own[: index + 1], process_set=some)
            assert rows[:, 0].tolist() == [0.0] + [float(size - 1)] * 2
            # The root is a rank of the world, also among some.
            assert (hvd.broadcast(own, size - 1, process_set=some) == size - 1).all()
            dealt = hvd.alltoall(torch.full((2,), rank), process_set=some)
            assert isinstance(dealt, torch.Tensor) and dealt.tolist() == members
            splits = torch.tensor([index, 2], dtype=torch.int32)
            _, received = hvd.alltoall(torch.ones(2 + index), splits, process_set=some)
            assert received.tolist() == ([0, 1] if index == 0 else [2, 2])
            part = hvd.reducescatter(torch.ones(3, 2), op=hvd.Sum, process_set=some)
            assert part.shape == (2 - index, 2) and (part == 2).all()
            hvd.barrier(process_set=some)
            told = hvd.broadcast_object(("from", rank), root_rank=size - 1, process_set=some)
            assert told == ("from", size - 1)
    works(size)


@everywhere(3, 4)
def test_sparse_tensors_among_some(rank, size):
    members = [0, size - 1]
    with added(members) as some:
        if rank in members:
            sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([2.0]), (size,))
            mean = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average, process_set=some)()
            assert mean.to_dense().tolist() == [1.0 if r in members else 0.0 for r in range(size)]


@everywhere(3, 4)
def test_overlapping_sets_run_collectives_of_one_name_concurrently(rank, size):
    with added([0, 1], list(range(1, size))) as (low, high):
        handles = {}
        order = [low, high] if rank % 2 else [high, low]
        for each in order:
            if each.included():
                handles[each] = hvd.allreduce_async(
                    torch.full((3,), float(rank)), op=hvd.Sum, name="one name", process_set=each
                )
        everybody = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="one name")
        for each, handle in handles.items():
            assert (hvd.synchronize(handle) == sum(each.ranks)).all(), each
        assert (hvd.synchronize(everybody) == size).all()


@everywhere()
def test_set_of_one_rank_returns_its_own_values(rank, size):
    with added([1]) as alone:
        if rank == 1:
            tensor = torch.full((2,), 5.0)
            assert hvd.allreduce(tensor, process_set=alone).tolist() == [5.0, 5.0]
            assert hvd.allgather(tensor, process_set=alone).tolist() == [5.0, 5.0]
            assert hvd.broadcast(tensor, 1, process_set=alone).tolist() == [5.0, 5.0]
            dealt = hvd.alltoall(tensor, process_set=alone)
            assert isinstance(dealt, torch.Tensor) and dealt.tolist() == [5.0, 5.0]
            assert hvd.reducescatter(tensor, process_set=alone).tolist() == [5.0, 5.0]
            hvd.barrier(process_set=alone)


@everywhere()
def test_rank_outside_of_a_set_cannot_use_the_set(rank, size):
    with added([0]) as first:
        if rank != 0:
            for call in (
                lambda: hvd.allreduce(torch.ones(1), process_set=first),
                lambda: hvd.grouped_allreduce([torch.ones(1)], process_set=first),
                lambda: hvd.allgather(torch.ones(1), process_set=first),
                lambda: hvd.broadcast(torch.ones(1), 0, process_set=first),
                lambda: hvd.alltoall(torch.ones(1), process_set=first),
                lambda: hvd.reducescatter(torch.ones(1), process_set=first),
                lambda: hvd.barrier(process_set=first),
                lambda: hvd.broadcast_object(1, process_set=first),
            ):
                with raises(ValueError, str(rank)):
                    call()
    works(size)


@everywhere()
def test_invalid_and_duplicate_sets_are_refused(rank, size):
    with raises(ValueError):
        hvd.add_process_set([0, size])  # no such rank
    with raises(ValueError):
        hvd.add_process_set([0, 0])
    with added([0, 1] if size > 2 else [1]) as some:
        with raises(ValueError):
            hvd.add_process_set(list(some.ranks))
        with raises(ValueError):
            hvd.add_process_set(hvd.ProcessSet(list(some.ranks)))
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    works(size)


@everywhere()
def test_different_requested_sets_raise_an_error_on_all_ranks(rank, size):
    with raises((ValueError, hvd.HorovodInternalError), "[Rr]ank"):
        hvd.add_process_set([0] if rank else [1])
    works(size)


@everywhere()
def test_mismatch_in_a_set_does_not_affect_later_collectives(rank, size):
    members = list(range(size - 1)) if size > 2 else [0, 1]
    with added(members) if size > 2 else added([0]) as some:
        if some.included() and some.size() > 1:
            with raises(hvd.HorovodInternalError, "[Rr]ank"):
                hvd.allreduce(torch.ones(2 + rank), name="wrong", process_set=some)
            assert hvd.allreduce(torch.ones(1), process_set=some).item() == 1
    works(size)


@everywhere(3, 4)
def test_root_outside_of_the_process_set_is_refused(rank, size):
    with added([0, 1]) as some:
        if some.included():
            with raises((ValueError, hvd.HorovodInternalError), str(size - 1)):
                hvd.broadcast(torch.ones(1), size - 1, process_set=some)
    works(size)


@everywhere(3, 4)
def test_gradients_are_computed_within_a_process_set(rank, size):
    members = [0, size - 1]
    with added(members) as some:
        if some.included():
            total = float(sum(m + 1 for m in members))
            for call, wanted in (
                (lambda t: hvd.allreduce(t, op=hvd.Sum, process_set=some), total),
                (lambda t: hvd.allreduce(t, process_set=some), total / 2),
                (lambda t: hvd.allgather(t, process_set=some), total / 2),
                (
                    lambda t: hvd.broadcast(t, size - 1, process_set=some),
                    total / 2 if rank == size - 1 else 0.0,
                ),
            ):
                tensor = torch.ones(2, requires_grad=True)
                (call(tensor) * (rank + 1)).sum().backward()
                assert tensor.grad is not None
                assert tensor.grad.tolist() == [wanted] * 2
            low, high = (member + 1.0 for member in members)
            calls: list[tuple[Any, list[float]]] = [
                (lambda t: hvd.alltoall(t, process_set=some), [low, high]),
                (lambda t: hvd.alltoall(t, [1, 2], process_set=some)[0], [low, high, high, 0.0]),
                (lambda t: hvd.reducescatter(t, process_set=some), [low, low, high]),
            ]
            for moved, rows in calls:
                # A row that is not sent has none.
                tensor = torch.ones(len(rows), requires_grad=True)
                (moved(tensor) * (rank + 1)).sum().backward()
                assert tensor.grad is not None and tensor.grad.tolist() == rows


@everywhere(4)
def test_optimizers_reduce_within_their_process_set(rank, size):
    """Two models at once, each trained by two separate ranks."""
    with added([0, 2], [1, 3]) as pairs:
        own = pairs[rank % 2]
        torch.manual_seed(rank % 2)
        model = torch.nn.Linear(3, 1, bias=False)
        before = model.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            named_parameters=model.named_parameters(),
            process_set=own,
        )
        model(torch.full((1, 3), float(rank))).sum().backward()
        optimizer.step()
        mean = sum(own.ranks) / 2
        assert torch.allclose(before - model.weight, torch.full((1, 3), mean))
    works(size)
