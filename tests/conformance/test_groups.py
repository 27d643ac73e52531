"""Grouped operations: one result for each tensor, in order, of mixed dtypes; whole or not at all; own names."""

from __future__ import annotations

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works


def mixed(rank: int) -> list[torch.Tensor]:
    return [
        torch.full((2, 3), float(rank)),
        torch.full((), rank),
        torch.full((5,), float(rank), dtype=torch.float64),
        torch.full((4,), float(rank), dtype=torch.float16),
        torch.empty(0),
        torch.full((1,), float(rank)),
    ]


@everywhere()
def test_grouped_allreduce_accepts_mixed_dtypes_and_shapes(rank, size):
    total = sum(range(size))
    tensors = mixed(rank)
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.grouped_allreduce(tensors, op=hvd.Sum, name="mixed"),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
    ):
        assert [r.dtype for r in results] == [t.dtype for t in tensors]
        assert [r.shape for r in results] == [t.shape for t in tensors]
        assert all((r == total).all() for r in results)
    assert all((t == rank).all() for t in tensors)
    for call in (
        lambda ts: hvd.grouped_allreduce_(ts, op=hvd.Sum),
        lambda ts: hvd.synchronize(hvd.grouped_allreduce_async_(ts, op=hvd.Sum)),
    ):
        tensors = mixed(rank)
        results = call(tensors)
        assert all(r is t for r, t in zip(results, tensors, strict=True))
        assert all((t == total).all() for t in tensors)


@everywhere()
def test_scales_and_compression_apply_to_each_tensor_of_a_group(rank, size):
    tensors = [torch.full((2,), float(n)) for n in range(3)]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
    assert [r[0].item() for r in results] == [n * size for n in range(3)]
    results = hvd.grouped_allreduce(tensors, compression=hvd.Compression.fp16)
    assert [r[0].item() for r in results] == [0.0, 1.0, 2.0]
    assert all(r.dtype == torch.float32 for r in results)


@everywhere()
def test_several_groups_match_in_any_order_of_submission(rank, size):
    """Even ranks submit them forwards, odd ones backwards."""
    numbers = list(range(5)) if rank % 2 == 0 else list(reversed(range(5)))
    handles = {}
    for n in numbers:
        tensors = [torch.full((k + 1,), float(n)) for k in range(4)]
        handles[n] = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name=f"group {n}")
    for n in range(5):
        results = hvd.synchronize(handles[n])
        assert [len(r) for r in results] == [1, 2, 3, 4]
        assert all((r == n * size).all() for r in results), n


@everywhere()
def test_grouped_and_single_collectives_of_one_name_are_independent(rank, size):
    group = hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)], op=hvd.Sum, name="same")
    gathered = hvd.allgather_async(torch.ones(1), name="same")
    assert [r.tolist() for r in hvd.synchronize(group)] == [[size], [size, size]]
    assert len(hvd.synchronize(gathered)) == size


@everywhere()
def test_group_of_fewer_tensors_on_one_rank_fails_as_a_whole(rank, size):
    """None of its tensors is reduced in place: every rank gets an error, and all tensors are unchanged."""
    count = 2 if rank == 0 else 3
    tensors = [torch.full((2,), float(rank)) for _ in range(count)]
    with raises(hvd.HorovodInternalError, "rank"):
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="different")
    assert all((t == rank).all() for t in tensors)
    works(size)


@everywhere()
def test_group_with_one_mismatched_tensor_fails_as_a_whole(rank, size):
    tensors = [torch.full((2,), float(rank)), torch.full((3 + (rank == 1),), float(rank))]
    with raises(hvd.HorovodInternalError, "rank"):
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="one differs")
    assert all((t == rank).all() for t in tensors)
    works(size)


@everywhere()
def test_groups_without_tensors_or_on_two_devices_are_refused(rank, size):
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with raises(ValueError):
            call([])
        with raises(ValueError, "device"):
            call([torch.ones(1), torch.ones(1, device="meta")])
    works(size)
