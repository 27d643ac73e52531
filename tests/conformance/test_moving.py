"""allgather, broadcast, alltoall and reducescatter: ragged or even, of every dtype; their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import FLOATS, INTEGERS, everywhere, raises, works

ANY = [*INTEGERS, *FLOATS, torch.bool]


def rows_of(total: int, size: int) -> list[int]:
    """The first ranks have one more."""
    return [total // size + (1 if r < total % size else 0) for r in range(size)]


def gradient(function: Callable[[torch.Tensor], Any], shape: Any, weight: float) -> torch.Tensor:
    tensor = torch.ones(shape, requires_grad=True)
    (function(tensor) * weight).sum().backward()
    assert tensor.grad is not None
    return tensor.grad


# ---- allgather -------------------------------------------------------------------------------------------------------


@everywhere()
def test_allgather_concatenates_ragged_tensors_of_any_dtype(rank, size):
    shapes = {
        "equal": [2] * size,
        "ragged": [r + 1 for r in range(size)],
        "one has none": [0 if r == 0 else 2 for r in range(size)],
        "only one has some": [3 if r == size - 1 else 0 for r in range(size)],
        "nobody has any": [0] * size,
    }
    for dtype in ANY:
        for told, rows in shapes.items():
            wanted = torch.cat([torch.full((n, 2, 3), r).to(dtype) for r, n in enumerate(rows)])
            own = torch.full((rows[rank], 2, 3), rank).to(dtype)
            for form, result in {
                "plain": hvd.allgather(own),
                "named": hvd.allgather(own, name=f"{dtype} {told}"),
                "async": hvd.synchronize(hvd.allgather_async(own)),
                "grouped": hvd.grouped_allgather([own])[0],
            }.items():
                assert result.dtype == dtype, (form, dtype, told)
                assert torch.equal(result, wanted), (form, dtype, told)


@everywhere()
def test_allgather_of_very_different_sizes(rank, size):
    rows = [100_000 if r == 1 else r for r in range(size)]
    result = hvd.allgather(torch.full((rows[rank], 4), float(rank)), name="uneven")
    assert result.shape == (sum(rows), 4)
    start = 0
    for r, count in enumerate(rows):
        assert (result[start : start + count] == r).all()
        start += count


@everywhere()
def test_grouped_allgather_with_different_rows_for_each(rank, size):
    tensors = [
        torch.full((rank + 1,), float(rank)),
        torch.full((2, 3), rank),
        torch.full((rank % 2, 5), float(rank), dtype=torch.float64),
    ]
    for results in (
        hvd.grouped_allgather(tensors, name="three"),
        hvd.synchronize(hvd.grouped_allgather_async(tensors, name="three")),
    ):
        assert len(results) == 3
        assert results[0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
        assert results[1].shape == (2 * size, 3) and results[1].dtype == torch.int64
        assert results[2].shape == (size // 2, 5) and results[2].dtype == torch.float64


@everywhere()
def test_scalar_tensors_are_refused_by_collectives_on_rows(rank, size):
    scalar = torch.tensor(1.0)
    errors = (ValueError, hvd.HorovodInternalError)
    with raises(errors, "dimension"):
        hvd.allgather(scalar)
    with raises(errors, "dimension"):
        hvd.alltoall(scalar)
    with raises(errors, "dimension"):
        hvd.reducescatter(scalar)
    works(size)


@everywhere()
def test_the_gradient_of_allgather_is_the_average_of_the_own_rows(rank, size):
    mean = (size + 1) / 2
    for rows in (2, rank + 1, rank):
        got = gradient(lambda t: hvd.allgather(t, name="gathered"), (rows, 3), rank + 1)
        assert torch.equal(got, torch.full((rows, 3), mean)), rows
    first = torch.ones(rank + 1, requires_grad=True)
    second = torch.ones(2, 2, requires_grad=True)
    a, b = hvd.grouped_allgather([first, second])
    (a.sum() + 10 * b.sum()).backward()
    assert first.grad is not None and second.grad is not None
    assert first.grad.tolist() == [1.0] * (rank + 1)
    assert (second.grad == 10).all()


# ---- broadcast -------------------------------------------------------------------------------------------------------


@everywhere()
def test_broadcast_sends_every_dtype_from_every_root(rank, size):
    for dtype in ANY:
        for root in range(size):
            own = torch.full((2, 2), rank).to(dtype)
            wanted = torch.full((2, 2), root).to(dtype)
            kept = own.clone()
            assert torch.equal(hvd.broadcast(own, root), wanted), (dtype, root)
            name = f"{dtype} {root}"
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(own, root, name)), wanted)
            assert torch.equal(own, kept), (dtype, root)
            assert hvd.broadcast_(own, root) is own
            assert torch.equal(own, wanted), (dtype, root)
            own.copy_(kept)
            assert hvd.synchronize(hvd.broadcast_async_(own, root_rank=root)) is own
            assert torch.equal(own, wanted), (dtype, root)


@everywhere()
def test_broadcast_accepts_unusual_shapes(rank, size):
    for shape in ((), (0,), (1, 0, 2), (3, 1)):
        result = hvd.broadcast(torch.full(shape, float(rank)), 1)
        assert result.shape == shape and (result == 1).all(), shape
    turned = torch.full((4, 6), float(rank)).t()
    hvd.broadcast_(turned, 1)
    assert (turned == 1).all()


@everywhere()
def test_the_gradient_of_broadcast_is_the_average_on_the_root_and_zero_elsewhere(rank, size):
    for root in range(size):
        got = gradient(functools.partial(hvd.broadcast, root_rank=root), (2, 2), rank + 1)
        wanted = (size + 1) / 2 if rank == root else 0.0
        assert torch.equal(got, torch.full((2, 2), wanted)), root


@everywhere()
def test_broadcast_from_a_missing_root_is_refused(rank, size):
    for root in (size, -1):
        with raises((ValueError, hvd.HorovodInternalError), str(root)):
            hvd.broadcast(torch.ones(1), root)
    works(size)


# ---- alltoall --------------------------------------------------------------------------------------------------------


@everywhere()
def test_alltoall_without_splits_divides_evenly(rank, size):
    for dtype in ANY:
        own = torch.arange(2 * size).reshape(-1, 1).to(dtype)
        result = hvd.alltoall(own)
        assert isinstance(result, torch.Tensor), "without splits there is only the output"
        assert torch.equal(result, own[2 * rank : 2 * rank + 2].repeat(size, 1)), dtype
    output, received = hvd.synchronize(hvd.alltoall_async(torch.arange(size), name="even"))
    assert output.tolist() == [rank] * size
    assert received.tolist() == [1] * size


@everywhere()
def test_alltoall_follows_splits(rank, size):
    """Rank s sends r + s rows to rank r."""
    splits = torch.tensor([r + rank for r in range(size)], dtype=torch.int32)
    rows = int(splits.sum())
    for dtype in ANY:
        own = torch.full((rows, 3), rank).to(dtype)
        for output, received in (
            hvd.alltoall(own, splits),
            hvd.alltoall(own, splits=splits, name=f"split {dtype}"),
            hvd.synchronize(hvd.alltoall_async(own, splits=splits)),
        ):
            assert received.tolist() == [rank + r for r in range(size)], dtype
            assert received.dtype == torch.int32
            wanted = torch.cat([torch.full((rank + r, 3), r).to(dtype) for r in range(size)])
            assert torch.equal(output, wanted), dtype


@everywhere()
def test_alltoall_with_empty_splits(rank, size):
    nothing = torch.zeros(size, dtype=torch.int32)
    output, received = hvd.alltoall(torch.ones(0, 2), nothing)
    assert output.shape == (0, 2) and received.tolist() == [0] * size
    # All data goes to rank 0.
    splits = torch.tensor([rank + 1] + [0] * (size - 1), dtype=torch.int32)
    output, received = hvd.alltoall(torch.full((rank + 1,), float(rank)), splits)
    if rank == 0:
        assert received.tolist() == [r + 1 for r in range(size)]
        assert output.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    else:
        assert received.tolist() == [0] * size and output.shape == (0,)


@everywhere()
def test_alltoall_refuses_invalid_splits(rank, size):
    even = torch.ones(2 * size, 2)
    too_many = torch.full((size,), 3, dtype=torch.int32)
    with raises(ValueError):
        hvd.alltoall(even, too_many)
    with raises(ValueError, "int32"):
        hvd.alltoall(even, torch.full((size,), 1, dtype=torch.int64))
    with raises(ValueError, "int32"):
        hvd.alltoall(even, torch.full((size,), 1.0))
    with raises(ValueError):
        hvd.alltoall(even, torch.ones(size + 1, dtype=torch.int32))
    with raises(ValueError):
        hvd.alltoall(torch.ones(2 * size + 1))
    with raises(ValueError):
        hvd.alltoall(even, torch.tensor([-1] + [1] * (size - 1), dtype=torch.int32))
    works(size)


@everywhere()
def test_gradient_of_alltoall_is_sent_back_to_its_source(rank, size):
    got = gradient(lambda t: hvd.alltoall(t), size, rank + 1)
    assert got.tolist() == [float(r + 1) for r in range(size)]
    splits = torch.tensor([r + 1 for r in range(size)], dtype=torch.int32)
    got = gradient(lambda t: hvd.alltoall(t, splits)[0], (int(splits.sum()), 2), rank + 1)
    wanted = torch.tensor([float(r + 1) for r in range(size) for _ in range(r + 1)])
    assert torch.equal(got, wanted.unsqueeze(1).expand(-1, 2))


# ---- reducescatter ---------------------------------------------------------------------------------------------------


@everywhere()
def test_reducescatter_gives_the_first_ranks_a_row_more(rank, size):
    for rows in (2 * size, 2 * size + 1, size - 1, 1, 0):
        parts = rows_of(rows, size)
        start = sum(parts[:rank])
        whole = torch.arange(rows * 2.0).reshape(rows, 2)
        total = whole[start : start + parts[rank]] * (size * (size + 1) / 2)
        own = whole * (rank + 1)
        for form, result in {
            "plain": hvd.reducescatter(own, op=hvd.Sum),
            "named": hvd.reducescatter(own, op=hvd.Sum, name=f"rows {rows}"),
            "async": hvd.synchronize(hvd.reducescatter_async(own, op=hvd.Sum)),
            "grouped": hvd.grouped_reducescatter([own], op=hvd.Sum)[0],
        }.items():
            assert result.shape == (parts[rank], 2), (form, rows)
            assert torch.equal(result, total), (form, rows)
        assert torch.allclose(hvd.reducescatter(own), total / size), "Average is the default"


@everywhere()
def test_reducescatter_supports_every_dtype(rank, size):
    for dtype in INTEGERS + FLOATS:
        own = torch.full((size + 1, 2), rank + 1).to(dtype)
        result = hvd.reducescatter(own, op=hvd.Sum)
        assert result.dtype == dtype and result.shape == (2 if rank == 0 else 1, 2), dtype
        assert (result == size * (size + 1) // 2).all(), dtype
        mean = hvd.reducescatter(own)
        wanted = (size + 1) / 2 if dtype.is_floating_point else (size + 1) // 2
        assert (mean == wanted).all(), dtype


@everywhere()
def test_reducescatter_applies_scales_and_compression_and_refuses_other_ops(rank, size):
    own = torch.full((size, 2), float(rank + 1))
    total = size * (size + 1) / 2
    result = hvd.reducescatter(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert (result == 2 * total).all()
    result = hvd.reducescatter(own, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert result.dtype == torch.float32 and (result == total).all()
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with raises((ValueError, NotImplementedError)):
            hvd.reducescatter(own, op=op)
    works(size)


@everywhere()
def test_grouped_reducescatter_reduces_and_divides_rows(rank, size):
    tensors = [torch.full((size,), float(rank)), torch.full((2 * size + 1, 3), rank)]
    for first, second in (
        hvd.grouped_reducescatter(tensors, op=hvd.Sum, name="two"),
        hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Sum, name="two")),
    ):
        assert first.tolist() == [sum(range(size))]
        assert second.shape == (3 if rank == 0 else 2, 3)
        assert (second == sum(range(size))).all()


@everywhere()
def test_the_gradient_of_reducescatter_is_gathered(rank, size):
    """Every rank's rows weigh rank + 1; for Sum it is times the number of ranks."""
    parts = rows_of(size + 1, size)
    weights = torch.tensor([float(r + 1) for r in range(size) for _ in range(parts[r])])
    got = gradient(lambda t: hvd.reducescatter(t), size + 1, rank + 1)
    assert torch.allclose(got, weights)
    got = gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum), size + 1, rank + 1)
    assert torch.allclose(got, weights * size)
    got = gradient(
        lambda t: hvd.reducescatter(t, prescale_factor=0.5, postscale_factor=4.0),
        size + 1,
        rank + 1,
    )
    assert torch.allclose(got, weights * 2)
