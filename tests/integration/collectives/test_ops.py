"""The public collectives on real ranks: what they compute, what they refuse, and their gradients."""

from __future__ import annotations

import functools
import inspect
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import elastic
from elastic.api.broadcasting import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from elastic.api.compression import Compression
from elastic.api.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    global_process_set,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_reducescatter,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from elastic.errors import PeerLost, TensorMismatch
from elastic.runtime import lifecycle
from harness.ranks import Ranks, in_a_world, on_all

SIZE = 3
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from in_a_world(SIZE)


def raises(
    kind: type[BaseException], text: str, function: Callable[..., Any], *args: Any, **kw: Any
) -> None:
    with pytest.raises(kind, match=text):
        function(*args, **kw)


# ---- allreduce ---------------------------------------------------------------------------------


@on_all
def test_allreduce_averages_by_default(rank, size):
    tensor = torch.tensor([1.0, 2.0, 6.0]) * (rank + 1)
    assert torch.equal(allreduce(tensor), torch.tensor([2.0, 4.0, 12.0]))
    assert tensor[0] == rank + 1


@on_all
def test_every_op_on_every_dtype(rank, size):
    fold = {Sum: operator.add, Min: torch.minimum, Max: torch.maximum, Product: operator.mul}
    for dtype in INTEGERS + FLOATS:
        every = [((torch.arange(7) + 2 * r) % 3 + 1).double() for r in range(size)]
        for op, reduce in fold.items():
            result = allreduce(every[rank].to(dtype), op=op)
            assert result.dtype == dtype
            assert torch.equal(result.double(), functools.reduce(reduce, every)), (dtype, op)
        expected = sum(every) / size if dtype in FLOATS else (sum(every) / size).trunc()
        result = allreduce(every[rank].to(dtype), op=Average)
        assert torch.allclose(result.double(), expected, rtol=8e-3 if dtype in FLOATS else 0)


@on_all
def test_an_average_of_small_integers_does_not_overflow(rank, size):
    assert allreduce(torch.full((4,), 250, dtype=torch.uint8)).tolist() == [250] * 4
    big = 2**60 + 1  # beyond what a float64 holds
    assert allreduce(torch.full((4,), big)).tolist() == [big] * 4
    assert allreduce(torch.full((4,), -2), op=Average).tolist() == [-2] * 4


@on_all
def test_scales_are_applied_before_and_after(rank, size):
    tensor = torch.ones(3)
    assert allreduce(tensor, op=Sum, prescale_factor=0.5, postscale_factor=4.0)[0] == 2.0 * size
    assert allreduce(tensor, prescale_factor=0.5)[0] == 0.5
    whole = torch.tensor([10, -10])
    result = allreduce(whole, op=Sum, prescale_factor=0.25)  # 2.5 is truncated to 2
    assert result.tolist() == [2 * size, -2 * size]
    half = torch.full((2,), 1000.0, dtype=torch.float16)
    assert allreduce(half, op=Sum, prescale_factor=1e-3)[0] == size
    for op in (Min, Max, Product):
        raises(ValueError, "no meaning with", allreduce, tensor, op=op, prescale_factor=2.0)


@on_all
def test_in_place_forms_change_the_tensor(rank, size):
    for make in (
        lambda: torch.full((4, 6), float(rank)),
        lambda: torch.full((6, 4), float(rank)).t(),  # not contiguous
        lambda: torch.full((4, 12), float(rank))[:, ::2],
    ):
        tensor = make()
        assert allreduce_(tensor, op=Sum) is tensor
        assert (tensor == 3.0).all()
        tensor = make()
        assert synchronize(allreduce_async_(tensor, op=Max)) is tensor
        assert (tensor == 2.0).all()
        tensor = make()
        assert (allreduce(tensor, op=Sum) == 3.0).all()
        assert (tensor == float(rank)).all()


@on_all
def test_parameters_may_be_reduced_in_place(rank, size):
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    allreduce_(parameter, op=Sum)
    assert parameter.tolist() == [3.0] * 3
    broadcast_(parameter.data.fill_(rank), 1)
    assert parameter.tolist() == [1.0] * 3


@on_all
def test_groups_mix_dtypes_and_shapes(rank, size):
    tensors = [
        torch.full((2, 3), float(rank)),
        torch.full((), rank),
        torch.full((5,), float(rank), dtype=torch.float64),
        torch.full((4,), float(rank)),
        torch.empty(0),
        torch.full((3,), 200, dtype=torch.uint8),
    ]
    results = grouped_allreduce(tensors)
    assert [result.dtype for result in results] == [tensor.dtype for tensor in tensors]
    assert [result.shape for result in results] == [tensor.shape for tensor in tensors]
    assert all((result == 1).all() for result in results[:-1])
    assert results[-1].tolist() == [200] * 3
    same = grouped_allreduce_(tensors, op=Sum)
    assert all(map(operator.is_, same, tensors))
    assert all((tensor == 3).all() for tensor in tensors[:-1])
    handle = grouped_allreduce_async([torch.ones(2), torch.ones(3)], op=Sum)
    assert [len(result) for result in synchronize(handle)] == [2, 3]


@on_all
def test_compression_shrinks_what_travels(rank, size):
    for compression in (Compression.fp16, Compression.bf16, Compression.none):
        result = allreduce(torch.full((3,), 1.5), compression=compression, op=Sum)
        assert result.dtype == torch.float32
        assert result.tolist() == [4.5] * 3


@on_all
def test_average_is_deprecated_and_excludes_op(rank, size):
    with pytest.warns(DeprecationWarning, match="use op=Average"):
        assert allreduce(torch.ones(1), average=False) == 3.0
    raises(ValueError, "both given", allreduce, torch.ones(1), average=True, op=Sum)


@on_all
def test_sparse_tensors_are_added_up(rank, size):
    def sparse(r):
        indices = torch.tensor([[0, r, 4][: r + 1]])  # rank 0 brings fewer entries than rank 2
        return torch.sparse_coo_tensor(indices, torch.ones(r + 1, 2), (5, 2))

    tensor = sparse(rank)
    expected = torch.stack([sparse(r).to_dense() for r in range(size)]).sum(0)
    total = sparse_allreduce_async(tensor, "embedding", Sum)()
    assert total.is_sparse
    assert torch.equal(total.to_dense(), expected)
    mean = sparse_allreduce_async(tensor, "embedding", Average)()
    assert torch.allclose(mean.to_dense(), expected / size)
    raises(ValueError, "Average or Sum", sparse_allreduce_async, tensor, "x", Max)
    raises(ValueError, "sparse COO", sparse_allreduce_async, torch.ones(1), "x", Sum)


# ---- the others --------------------------------------------------------------------------------


@on_all
def test_allgather_takes_ragged_tensors_of_any_dtype(rank, size):
    for dtype in [*INTEGERS, *FLOATS, torch.bool, torch.complex64]:
        for rows in ([2, 2, 2], [1, 2, 3], [0, 5, 0], [0, 0, 0]):
            expected = torch.cat([torch.full((n, 2), r).to(dtype) for r, n in enumerate(rows)])
            result = allgather(torch.full((rows[rank], 2), rank).to(dtype))
            assert result.dtype == dtype
            assert torch.equal(result, expected), (dtype, rows)
    first, second = grouped_allgather([torch.full((rank,), rank), torch.ones(2, 2)])
    assert first.tolist() == [1, 2, 2]
    assert second.shape == (6, 2)


@on_all
def test_a_very_uneven_allgather_is_sent_without_padding(rank, size):
    rows = [300_000 if rank == 1 else rank]
    result = synchronize(allgather_async(torch.full((rows[0], 2), float(rank))))
    assert result.shape == (300_002, 2)
    assert result[:300_000].eq(1).all()
    assert result[300_000:].eq(2).all()


@on_all
def test_broadcast_from_every_root(rank, size):
    for root in range(size):
        tensor = torch.full((2, 2), float(rank))
        assert (broadcast(tensor, root) == root).all()
        assert (tensor == rank).all()
        assert (synchronize(broadcast_async(tensor, root)) == root).all()
        assert broadcast_(tensor, root) is tensor
        assert (tensor == root).all()
        turned = torch.full((4, 6), rank).t()
        broadcast_(turned, root)
        assert (turned == root).all()
        assert broadcast(torch.tensor(rank > 1), root).item() is (root > 1)


@on_all
def test_alltoall_with_and_without_splits(rank, size):
    result = alltoall(torch.arange(size * 2) + 10 * rank)
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [10 * r + 2 * rank + i for r in range(size) for i in range(2)]
    splits = torch.tensor([rank] * size, dtype=torch.int32)
    output, received = alltoall(torch.full((rank * size, 2), float(rank)), splits)
    assert received.tolist() == [0, 1, 2]
    assert received.dtype == torch.int32
    assert output[:, 0].tolist() == [1.0, 2.0, 2.0]
    output, received = synchronize(alltoall_async(torch.arange(7), [1, 2, 3]))  # one row stays
    assert len(output) == (rank + 1) * size


@on_all
def test_reducescatter_gives_the_first_ranks_a_row_more(rank, size):
    tensor = torch.arange(7.0).unsqueeze(1) * (rank + 1)
    bounds = [(0, 3), (3, 5), (5, 7)][rank]
    expected = torch.arange(7.0)[slice(*bounds)].unsqueeze(1) * 6
    assert torch.equal(reducescatter(tensor, op=Sum), expected)
    assert torch.equal(reducescatter(tensor), expected / 3)
    assert torch.equal(synchronize(reducescatter_async(tensor, op=Sum)), expected)
    for dtype in INTEGERS + FLOATS:
        result = reducescatter(torch.full((4,), rank + 1).to(dtype), op=Sum)
        assert result.dtype == dtype
        assert result.tolist() == [6] * (2 if rank == 0 else 1)
    first, second = grouped_reducescatter([torch.ones(3), torch.ones(2, 2)], op=Sum)
    assert first.tolist() == [3.0]
    assert second.shape == ((1 if rank < 2 else 0), 2)
    assert reducescatter(torch.ones(3), op=Sum, prescale_factor=2.0, postscale_factor=0.5) == 3.0


@on_all
def test_barrier_holds_until_all_have_come(rank, size):
    if rank == 1:
        time.sleep(0.1)
    before = time.monotonic()
    barrier()
    after = time.monotonic()
    # One clock for all processes of a machine: nobody left before the last came.
    latest = allreduce(torch.tensor(before, dtype=torch.float64), op=Max)
    assert after >= float(latest)


# ---- handles and refusals ----------------------------------------------------------------------


@on_all
def test_handles_are_integers_to_poll_and_synchronize(rank, size):
    handles = [allreduce_async(torch.full((10,), float(i)), op=Sum) for i in range(5)]
    assert all(isinstance(handle, int) for handle in handles)
    barrier()
    assert [synchronize(handle)[0].item() for handle in reversed(handles)] == [12, 9, 6, 3, 0]
    assert synchronize(handles[0]) is None
    raises(ValueError, "was synchronized already", poll, handles[0])
    handle = allreduce_async(torch.ones(1), op=Sum)
    deadline = time.monotonic() + 5
    while not poll(handle):
        assert time.monotonic() < deadline
    assert synchronize(handle) == 3.0


@on_all
def test_a_name_is_free_again_once_synchronized(rank, size):
    handle = allreduce_async(torch.ones(1), name="loss", op=Sum)
    raises(ValueError, "loss is in flight already", allreduce_async, torch.ones(1), name="loss")
    gathered = allgather_async(torch.ones(1), name="loss")  # another kind of collective
    assert synchronize(handle) == 3.0
    assert len(synchronize(gathered)) == size
    assert allreduce(torch.ones(1), name="loss", op=Sum) == 3.0


@on_all
def test_what_is_refused_is_refused_before_anything_is_sent(rank, size):
    one = torch.ones(1)
    raises(TypeError, "uint8", allreduce, torch.ones(1, dtype=torch.bool))
    raises(TypeError, "view_as_real", allreduce, torch.ones(1, dtype=torch.complex64))
    raises(ValueError, "Adasum", allreduce, one, op=Adasum)
    raises(ValueError, "give Average", allreduce, one, op=17)
    raises(ValueError, "between 0 and 2", broadcast, one, 3)
    raises(ValueError, "between 0 and 2", broadcast_, one, -1)
    raises(ValueError, "at least 1 dim", allgather, torch.tensor(1.0))
    raises(ValueError, "at least 1 dim", alltoall, torch.tensor(1.0))
    raises(ValueError, "at least 1 dim", reducescatter, torch.tensor(1.0))
    raises(ValueError, "give splits", alltoall, torch.ones(4))
    raises(ValueError, "one each", alltoall, torch.ones(4), [4])
    raises(ValueError, "add up to more", alltoall, torch.ones(4), [4, 4, 4])
    raises(ValueError, "int32", alltoall, torch.ones(3), torch.tensor([1, 1, 1]))
    raises(ValueError, "Average or Sum", reducescatter, one, op=Max)
    raises(ValueError, "at least one", grouped_allreduce, [])
    raises(ValueError, "one device", grouped_allreduce, [one, torch.ones(1, device="meta")])
    raises(ValueError, "give a ProcessSet", allreduce, one, process_set=object())
    assert allreduce(one, op=Sum, process_set=global_process_set) == 3.0
    assert (global_process_set.rank(), global_process_set.size()) == (rank, size)
    assert global_process_set.included()


@on_all
def test_shapes_that_do_not_fit_raise_on_every_rank_and_break_nothing(rank, size):
    shapes = "beyond the first dimension: ranks 0 and 2 have .any, 2., rank 1 has .any, 3."
    raises(TensorMismatch, shapes, allgather, torch.ones(2, 3 if rank == 1 else 2))
    kind = torch.float64 if rank == 2 else torch.float32
    raises(TensorMismatch, "the dtype: .*rank 2 has float64", allgather, torch.ones(2, dtype=kind))
    raises(TensorMismatch, "number of tensors", grouped_allgather, [torch.ones(1)] * (rank + 1))
    raises(TensorMismatch, "the shape", alltoall, torch.ones(3, 1 + rank))
    raises(TensorMismatch, "the shape: .*rank 2 has .3.", allreduce, torch.ones(1 + rank), name="x")
    raises(TensorMismatch, "the shape", allreduce, torch.ones(2, 3) if rank else torch.ones(3, 2))
    raises(TensorMismatch, "the reduction", allreduce, torch.ones(1), op=Max if rank else Sum)
    raises(TensorMismatch, "the root rank", broadcast, torch.ones(1), rank)
    one = torch.ones(1)
    raises(TensorMismatch, "prescale_factor", allreduce, one, prescale_factor=1.0 + rank)
    assert allreduce(torch.ones(1), op=Sum) == 3.0


@on_all
def test_handles_of_a_lost_world_raise(rank, size):
    kept = allreduce_async(torch.ones(1), name="kept", op=Sum)
    barrier()
    recovery = lifecycle.current().session.recovery
    recovery.generation += 1
    try:
        assert poll(kept)
        raises(PeerLost, "is gone", synchronize, kept)
    finally:
        recovery.generation -= 1


@on_all
def test_names_match_in_any_order_and_large_and_small_ones_are_mixed(rank, size):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(rank)).tolist()
    elements = [(300_000 if number % 20 == 0 else number + 1) for number in range(60)]
    for _ in range(3):  # asked by name, given a number, asked by number
        handles = {
            number: allreduce_async_(
                torch.full((elements[number],), float(number + rank)), name=f"n{number}", op=Sum
            )
            for number in order
        }
        for number in sorted(order):
            result = synchronize(handles[number])
            assert result.shape == (elements[number],)
            assert (result == 3.0 * number + 3.0).all(), number


@on_all
def test_what_is_reduced_alone_again_and_again_starts_without_being_asked_for(rank, size):
    for _ in range(9):
        assert allreduce(torch.ones(5), name="order", op=Sum).tolist() == [3.0] * 5
    find, ranks = lifecycle.current().session.groups.find, tuple(range(size))
    made = [find((f"standing order {number}", "cpu", ranks)) for number in range(1000)]
    assert any(made), "it came to that"
    for number in range(18):
        tensor = torch.full((5,), float(rank + number))
        if number % 3 == 0:
            tensor = allreduce(tensor, name="order", op=Sum)
        elif number % 3 == 1:
            if rank == 1:
                time.sleep(0.05)  # long enough to be reported as late
            handle = allreduce_async_(tensor, name="order", op=Sum)
            other = allreduce_async(torch.ones(1), name=f"beside it {number}", op=Sum)
            assert synchronize(other) == 3.0
            tensor = synchronize(handle)
        else:
            handle = allreduce_async_(tensor, name="order", op=Sum)
            deadline = time.monotonic() + 10
            while not poll(handle):
                assert time.monotonic() < deadline
            assert synchronize(handle) is tensor
        assert tensor.tolist() == [3.0 * number + 3] * 5
    raises(
        TensorMismatch, "the shape", allreduce, torch.ones(5 + (rank == 2)), name="order", op=Sum
    )
    for _ in range(6):
        assert allreduce(torch.ones(5), name="order", op=Sum).tolist() == [3.0] * 5


@on_all
def test_a_name_may_come_back_with_another_shape(rank, size):
    for rows in (1, 1, 1, 2, 2, 1, 1):
        assert allreduce(torch.ones(rows), name="changes", op=Sum).tolist() == [3.0] * rows
        assert len(allgather(torch.ones(rows + rank), name="changes")) == 3 * rows + 3
    raises(TensorMismatch, "the shape", allreduce, torch.ones(1 + (rank == 1)), name="changes")
    assert allreduce(torch.ones(1), name="changes", op=Sum).tolist() == [3.0]


# ---- gradients ---------------------------------------------------------------------------------


def gradient_of(function: Callable[..., Any], shape: Any, weight: float) -> Any:
    tensor = torch.ones(shape, requires_grad=True)
    result = function(tensor)
    (result * weight).sum().backward()
    assert tensor.grad is not None
    return tensor.grad.tolist()


@on_all
def test_gradients_of_allreduce_are_reduced_alike(rank, size):
    weight = float(rank + 1)
    assert gradient_of(allreduce, 2, weight) == [2.0] * 2
    assert gradient_of(lambda t: allreduce(t, op=Sum), 2, weight) == [6.0] * 2
    assert gradient_of(lambda t: allreduce(t, op=Sum, prescale_factor=0.5), 2, weight) == [3.0] * 2
    assert gradient_of(lambda t: allreduce(t, op=Max), 2, weight) == [3.0] * 2
    assert (
        gradient_of(lambda t: sum(grouped_allreduce([t, 2 * t], op=Sum)), 2, weight) == [18.0] * 2
    )
    fp16 = Compression.fp16
    assert gradient_of(lambda t: allreduce(t, compression=fp16), 2, weight) == [2.0] * 2


@on_all
def test_gradients_of_the_others_follow_the_rows(rank, size):
    weight = float(rank + 1)
    assert gradient_of(allgather, rank + 1, weight) == [2.0] * (rank + 1)
    expected = [2.0] * 2 if rank == 1 else [0.0] * 2
    assert gradient_of(lambda t: broadcast(t, 1), 2, weight) == expected
    assert gradient_of(alltoall, 3, weight) == [1.0, 2.0, 3.0]
    splits = [1, 0, 1]
    assert gradient_of(lambda t: alltoall(t, splits)[0], 4, weight) == [1.0, 3.0, 0.0, 0.0]
    assert gradient_of(reducescatter, 4, weight) == [1.0, 1.0, 2.0, 3.0]
    assert gradient_of(lambda t: reducescatter(t, op=Sum), 4, weight) == [3.0, 3.0, 6.0, 9.0]


# ---- objects, parameters, optimizer state ------------------------------------------------------


@on_all
def test_objects_travel_to_all_and_from_all(rank, size):
    local = {"rank": rank, "f": lambda x: x + rank, "blob": b"x" * (1000 * rank)}
    received = broadcast_object(local, root_rank=2, name="settings")
    assert received["f"](1) == 3
    assert (received is local) == (rank == 2)
    gathered = allgather_object(local, name="all")
    assert [each["rank"] for each in gathered] == [0, 1, 2]
    assert [len(each["blob"]) for each in gathered] == [0, 1000, 2000]


@on_all
def test_parameters_are_overwritten_in_place(rank, size):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.half()
    model[1].double()
    model.register_buffer("mask", torch.tensor([rank == 1, True, False]))
    kept = dict(model.named_parameters())
    broadcast_parameters(model.state_dict(), root_rank=1)
    broadcast_parameters([("none", None), *model.named_parameters()], 1)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    states = allgather_object({key: value.clone() for key, value in model.state_dict().items()})
    for state in states:
        assert all(torch.equal(value, states[1][key]) for key, value in state.items())
    broadcast_parameters([], 0)
    raises(ValueError, "state_dict", broadcast_parameters, model.parameters())
    raises(TypeError, "broadcast_object", broadcast_parameters, {"extra": 3})
    raises(ValueError, "build the same model", broadcast_parameters, {"w": torch.ones(1 + rank)})


def trained(make: Callable[[Any], torch.optim.Optimizer], seed: int, steps: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_all
def test_optimizer_state_reaches_ranks_that_never_stepped(rank, size):
    makers = [
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1)),  # options, but no state
        lambda p: torch.optim.AdamW(p, lr=0.1 * (rank + 1), amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1 * (rank + 1)), fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1 * (rank + 1)),
    ]
    for make in makers:
        model, optimizer = trained(make, seed=rank, steps=2 if rank == 1 else 0)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        broadcast_optimizer_state(optimizer, root_rank=1, model=model)
        assert all(map(torch.equal, weights, model.parameters()))  # no step was made
        left = [parameter.grad for parameter in model.parameters()]
        assert not any(gradient is not None and gradient.any() for gradient in left)
        states = allgather_object(optimizer.state_dict())
        for state in states:
            assert str(state) == str(states[1])
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()


@on_all
def test_optimizer_state_is_overwritten_in_place_and_dropped(rank, size):
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer = trained(make, seed=rank, steps=1)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    broadcast_optimizer_state(optimizer, 0)
    after = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(map(operator.is_, buffers, after))
    if rank == 0:
        optimizer.state.clear()
    broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state
    lbfgs = torch.optim.LBFGS(model.parameters())
    raises(ValueError, "LBFGS", broadcast_optimizer_state, lbfgs, 0)
    other = torch.optim.SGD([torch.ones(2 + rank, requires_grad=True)], lr=0.1)
    raises(ValueError, "ranks' optimizers", broadcast_optimizer_state, other, 0)


# ---- the surface -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "allreduce",
            "tensor average name compression op prescale_factor postscale_factor process_set",
        ),
        ("allreduce_async", "tensor average name op prescale_factor postscale_factor process_set"),
        ("allreduce_", "tensor average name op prescale_factor postscale_factor process_set"),
        ("allreduce_async_", "tensor average name op prescale_factor postscale_factor process_set"),
        (
            "grouped_allreduce",
            "tensors average name compression op prescale_factor postscale_factor process_set",
        ),
        ("sparse_allreduce_async", "tensor name op process_set"),
        ("allgather", "tensor name process_set"),
        ("grouped_allgather_async", "tensors name process_set"),
        ("broadcast", "tensor root_rank name process_set"),
        ("alltoall", "tensor splits name process_set"),
        (
            "reducescatter",
            "tensor name compression op process_set prescale_factor postscale_factor",
        ),
        ("reducescatter_async", "tensor name op process_set prescale_factor postscale_factor"),
        ("barrier", "process_set"),
        ("broadcast_parameters", "params root_rank process_set"),
        ("broadcast_optimizer_state", "optimizer root_rank model process_set"),
        ("broadcast_object", "obj root_rank name process_set"),
        ("allgather_object", "obj name process_set"),
    ],
)
def test_signatures_are_horovods(name, expected):
    assert " ".join(inspect.signature(getattr(elastic, name)).parameters) == expected


def test_constants_are_horovods_numbers():
    assert [Average, Sum, Adasum, Min, Max, Product] == [0, 1, 2, 3, 4, 5]
