"""Mismatched calls raise HorovodInternalError on every rank, with ranks and calls, and the world stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works


def all_raise(size: int, call: Callable[[], Any], *texts: str) -> None:
    """Twice, so that the cache of the first time matters; then the world is checked."""
    for _ in range(2):
        with raises(
            hvd.HorovodInternalError, "[Mm]ismatched|differ|do not fit", r"[Rr]ank", *texts
        ):
            call()
    works(size)


@everywhere()
def test_different_shapes_raise_an_error_on_all_ranks(rank, size):
    odd = rank == size - 1
    shape = (3, 19) if odd else (3, 17)
    for told, call in {
        "allreduce": lambda: hvd.allreduce(torch.ones(shape), name="shape"),
        "without a name": lambda: hvd.allreduce(torch.ones(shape)),
        "in place": lambda: hvd.allreduce_(torch.ones(shape), name="shape"),
        "async": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(shape), name="shape")),
        "broadcast": lambda: hvd.broadcast(torch.ones(shape), 0, name="shape"),
        "allgather": lambda: hvd.allgather(torch.ones(shape), name="shape"),
        "alltoall": lambda: hvd.alltoall(torch.ones(size, *shape), name="shape"),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(shape), name="shape"),
        "as many elements": lambda: hvd.allreduce(
            torch.ones(17, 19) if odd else torch.ones(19, 17), name="shape"
        ),
    }.items():
        try:
            all_raise(size, call, "17", "19")
        except AssertionError as error:
            raise AssertionError(f"{told}: {error}") from error


@everywhere()
def test_different_dimensions_raise_an_error_on_all_ranks(rank, size):
    shape = (4,) if rank else (4, 1)
    all_raise(size, lambda: hvd.allreduce(torch.ones(shape), name="dimensions"))
    all_raise(size, lambda: hvd.allgather(torch.ones(shape), name="dimensions"))


@everywhere()
def test_different_dtypes_raise_an_error_on_all_ranks(rank, size):
    dtype = torch.float64 if rank == 1 else torch.float32
    for call in (
        lambda: hvd.allreduce(torch.ones(2, dtype=dtype), name="dtype"),
        lambda: hvd.broadcast(torch.ones(2, dtype=dtype), 0, name="dtype"),
        lambda: hvd.allgather(torch.ones(2, dtype=dtype), name="dtype"),
        lambda: hvd.alltoall(torch.ones(size, dtype=dtype), name="dtype"),
        lambda: hvd.reducescatter(torch.ones(size, dtype=dtype), name="dtype"),
    ):
        all_raise(size, call, "float64", "float32")


@everywhere()
def test_different_ops_raise_an_error_on_all_ranks(rank, size):
    op = hvd.Max if rank == 1 else hvd.Sum
    all_raise(size, lambda: hvd.allreduce(torch.ones(2), op=op, name="op"))
    op = hvd.Average if rank == 1 else hvd.Sum
    all_raise(size, lambda: hvd.allreduce(torch.ones(2), op=op, name="op"))
    all_raise(size, lambda: hvd.reducescatter(torch.ones(size), op=op, name="op"))


@everywhere()
def test_different_roots_raise_an_error_on_all_ranks(rank, size):
    root = 1 if rank == 1 else 0
    all_raise(size, lambda: hvd.broadcast(torch.ones(2), root, name="root"), "root")
    all_raise(size, lambda: hvd.broadcast_(torch.ones(2), root, name="root"), "root")


@everywhere()
def test_different_scales_raise_an_error_on_all_ranks(rank, size):
    factor = 2.0 if rank == 1 else 1.0
    all_raise(
        size, lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=factor, name="pre")
    )
    all_raise(
        size, lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum, postscale_factor=factor, name="post")
    )


@everywhere()
def test_mismatch_of_a_cached_name_is_found(rank, size):
    """Ten steps are right, then one rank changes its tensor, then all are right again."""
    for turn in range(10):
        assert (hvd.allreduce(torch.ones(4), op=hvd.Sum, name="step") == size).all(), turn
    with raises(hvd.HorovodInternalError, "[Rr]ank"):
        hvd.allreduce(torch.ones(4 + (rank == 0)), op=hvd.Sum, name="step")
    for turn in range(3):
        assert (hvd.allreduce(torch.ones(4), op=hvd.Sum, name="step") == size).all(), turn


@everywhere()
def test_collectives_in_flight_continue_after_a_mismatch(rank, size):
    before = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="before")
    wrong = hvd.allreduce_async(torch.ones(2 + rank), op=hvd.Sum, name="wrong")
    after = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="after")
    assert hvd.synchronize(after).tolist() == [size] * 3
    with raises(hvd.HorovodInternalError, "wrong"):
        hvd.synchronize(wrong)
    assert hvd.synchronize(before).tolist() == [size] * 2


@everywhere()
def test_mismatch_leaves_in_place_tensors_unchanged(rank, size):
    tensor = torch.full((2 + rank,), float(rank))
    with raises(hvd.HorovodInternalError):
        hvd.allreduce_(tensor, name="kept")
    assert (tensor == rank).all()


@everywhere()
def test_a_mismatch_is_not_recovered_by_elastic_run(rank, size):
    """The error would repeat forever: `hvd.elastic.run` passes it on."""
    try:
        hvd.allreduce(torch.ones(2 + rank), name="wrong")
    except RuntimeError as error:
        caught = error
    assert isinstance(caught, hvd.HorovodInternalError)
    assert type(caught) is not hvd.HorovodInternalError
    works(size)


@everywhere()
def test_invalid_arguments_on_one_rank_raise_before_any_message_is_sent(rank, size):
    """Only one rank is wrong, and it alone raises: the others are not affected."""
    if rank == 0:
        with raises(TypeError):
            hvd.allreduce([1.0, 2.0])  # type: ignore[arg-type]
        with raises((TypeError, ValueError)):
            hvd.allreduce(torch.ones(1, dtype=torch.bool))
        with raises((TypeError, ValueError)):
            hvd.allreduce(torch.ones(1, dtype=torch.complex64))
        with raises(ValueError):
            hvd.allreduce(torch.ones(1), op=17)
        for op in (hvd.Min, hvd.Max, hvd.Product):
            with raises(ValueError):
                hvd.allreduce(torch.ones(1), op=op, prescale_factor=2.0)
    works(size)


@everywhere()
def test_unknown_handle_is_none_for_synchronize_and_an_error_for_poll(rank, size):
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    assert hvd.synchronize(handle).item() == size
    assert hvd.synchronize(handle) is None, "the second time there is nothing left to take"
    assert hvd.synchronize(10**9) is None
    with raises(ValueError):
        hvd.poll(10**9)
    works(size)


@everywhere(3)
def test_unsupported_operations_raise_horovods_exception_types(rank, size):
    """Scripts catch HorovodInternalError where Horovod raises it; ours are ValueErrors as well, and nothing is sent."""
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        for call in (hvd.reducescatter, hvd.reducescatter_async):
            with raises(hvd.HorovodInternalError, "reducescatter can't use"):
                call(torch.ones(size), op=op)
    for refused in (hvd.allgather, hvd.reducescatter):
        with raises(hvd.HorovodInternalError, "at least 1 dimension"):
            refused(torch.tensor(1.0))
    with raises(NotImplementedError, "Adasum requires 1, 2, 4, 8"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    for kind in (TypeError, ValueError):
        with raises(kind, "can't reduce a tensor of torch.complex64"):
            hvd.allreduce(torch.ones(2, dtype=torch.complex64))
    with raises(ValueError, "state_dict"):
        hvd.broadcast_parameters(torch.nn.Linear(1, 1), root_rank=0)  # type: ignore[arg-type]
    works(size)
