"""Collectives match by name, in any order of submission; mismatches raise on every rank."""

import random

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works


@everywhere()
def test_collectives_complete_in_any_order_of_submission(rank, size):
    """A hundred collectives of all kinds, shuffled on each rank by its own seed; five times, so that all are cached."""
    for turn in range(5):
        tasks = []
        for n in range(20):
            tasks += [(kind, n) for kind in ("sum", "average", "gather", "broadcast", "exchange")]
        random.Random(1000 * turn + rank).shuffle(tasks)
        handles = {}
        for kind, n in tasks:
            value = torch.full((n + 1, 2), float(rank + n))
            name = f"{kind}.{n}"
            if kind == "sum":
                handles[kind, n] = hvd.allreduce_async(value, op=hvd.Sum, name=name)
            elif kind == "average":
                handles[kind, n] = hvd.allreduce_async_(value, op=hvd.Average, name=name)
            elif kind == "gather":
                handles[kind, n] = hvd.allgather_async(value[: n % 4 + rank], name=name)
            elif kind == "broadcast":
                handles[kind, n] = hvd.broadcast_async(value, n % size, name=name)
            else:
                handles[kind, n] = hvd.alltoall_async(
                    torch.full((size * 2,), float(rank + n)), name=name
                )
        random.Random(rank).shuffle(tasks)
        for kind, n in tasks:
            result = hvd.synchronize(handles[kind, n])
            told = f"round {turn}, {kind} {n}"
            ranks = range(size)
            if kind == "sum":
                assert (result == sum(r + n for r in ranks)).all(), told
            elif kind == "average":
                assert (result == sum(r + n for r in ranks) / size).all(), told
            elif kind == "gather":
                rows = [min(n % 4 + r, n + 1) for r in ranks]
                wanted = [float(r + n) for r in ranks for _ in range(rows[r])]
                assert result[:, 0].tolist() == wanted, told
            elif kind == "broadcast":
                assert (result == n % size + n).all(), told
            else:
                assert result[0].tolist() == [float(r + n) for r in ranks for _ in range(2)], told


@everywhere()
def test_one_name_may_be_used_by_different_operations_at_once(rank, size):
    """One name for an allreduce, a broadcast and an allgather in flight at once is not a duplicate."""
    calls = [
        lambda: hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="x"),
        lambda: hvd.broadcast_async(torch.full((1,), float(rank)), 1, name="x"),
        lambda: hvd.allgather_async(torch.ones(2), name="x"),
        lambda: hvd.alltoall_async(torch.ones(size), name="x"),
        lambda: hvd.reducescatter_async(torch.ones(size), op=hvd.Sum, name="x"),
    ]
    order = list(range(len(calls)))
    random.Random(rank).shuffle(order)
    handles = {n: calls[n]() for n in order}
    results = [hvd.synchronize(handles[n]) for n in range(len(calls))]
    assert results[0].tolist() == [size]
    assert results[1].tolist() == [1.0]
    assert results[2].tolist() == [1.0] * (2 * size)
    assert results[3][0].tolist() == [1.0] * size
    assert results[4].tolist() == [size]


@everywhere()
def test_a_name_in_flight_can_not_be_submitted_again(rank, size):
    """The second call raises; the first one continues, and the name is free once it was synchronized."""
    calls = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice"),
        "allgather": lambda: hvd.allgather_async(torch.ones(2), name="twice"),
        "broadcast": lambda: hvd.broadcast_async(torch.ones(2), 0, name="twice"),
        "alltoall": lambda: hvd.alltoall_async(torch.ones(size), name="twice"),
        "group": lambda: hvd.grouped_allreduce_async([torch.ones(2)] * 2, name="group twice"),
    }
    for told, call in calls.items():
        for who in range(2):
            if rank == who:
                first = call()
                with raises(ValueError, "twice"):
                    # the other ranks have not arrived yet, so that it is certainly in flight
                    call()
            hvd.barrier()
            if rank != who:
                first = call()
            assert hvd.synchronize(first) is not None, told
    works(size)


@everywhere()
def test_duplicate_name_is_refused_before_the_other_ranks_have_arrived(rank, size):
    """Rank 0 is alone with its name when it submits it again; the others arrive later."""
    handle = None
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="early")
        with raises(ValueError, "early"):
            hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="early")
    hvd.barrier()
    if rank != 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="early")
    assert handle is not None
    assert hvd.synchronize(handle).tolist() == [size, size]


@everywhere()
def test_collectives_without_a_name_match_by_their_order(rank, size):
    """Between named ones that are submitted in different orders."""
    handles = []
    for n in range(10):
        if rank % 2:
            handles.append(hvd.allreduce_async(torch.full((3,), float(n)), op=hvd.Sum))
        named = hvd.allreduce_async(torch.ones(n + 1), name=f"named {n}", op=hvd.Sum)
        if not rank % 2:
            handles.append(hvd.allreduce_async(torch.full((3,), float(n)), op=hvd.Sum))
        assert hvd.synchronize(named).tolist() == [size] * (n + 1)
    assert [hvd.synchronize(h)[0].item() for h in handles] == [n * size for n in range(10)]


@everywhere()
def test_shape_scale_and_root_may_change_under_one_name(rank, size):
    """On all ranks alike, which is valid: the cache entry of the name is dropped."""
    for shape in ((2,), (2,), (3, 1), (2,), (), (2,)):
        result = hvd.allreduce(torch.ones(shape), op=hvd.Sum, name="changing")
        assert result.shape == shape and (result == size).all()
    for dtype in (torch.float32, torch.float64, torch.int32):
        result = hvd.allreduce(torch.ones(2, dtype=dtype), op=hvd.Sum, name="changing")
        assert result.dtype == dtype and (result == size).all()
    for op, wanted in ((hvd.Sum, size), (hvd.Average, 1), (hvd.Max, 1), (hvd.Sum, size)):
        assert (hvd.allreduce(torch.ones(2), op=op, name="changing") == wanted).all()
    for scale in (1.0, 2.0, 1.0):
        result = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="changing", prescale_factor=scale)
        assert (result == scale * size).all()
    for root in range(size):
        value = torch.full((2,), float(rank))
        assert (hvd.broadcast(value, root, name="changing") == root).all()


@everywhere()
def test_more_names_than_the_cache_capacity_are_reduced(rank, size):
    for turn in range(2):
        handles = [
            hvd.allreduce_async(torch.full((1,), float(n)), op=hvd.Sum, name=f"many {n}")
            for n in range(1500)
        ]
        results = [hvd.synchronize(h).item() for h in handles]
        assert results == [n * size for n in range(1500)], turn


@everywhere()
def test_unusual_names_are_accepted(rank, size):
    for name in ("", "a" * 2000, "Überraschung ✓", "with space\nand line", "allreduce.x", "0"):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=name).item() == size, name
