"""The public collectives on real ranks: beyond tests/conformance, which checks their results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.api.broadcasting import broadcast_optimizer_state, broadcast_parameters
from elastic.api.ops import (
    Adasum,
    Average,
    Max,
    Sum,
    allgather,
    allreduce,
    allreduce_async,
    allreduce_async_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    global_process_set,
    grouped_allreduce,
    poll,
    reducescatter,
    synchronize,
)
from elastic.errors import PeerLost
from elastic.runtime import lifecycle
from harness.ranks import fixture, join, on_all

SIZE = 3


ranks = fixture(SIZE, enter=join)


def raises(
    kind: type[BaseException], text: str, function: Callable[..., Any], *args: Any, **kw: Any
) -> None:
    with pytest.raises(kind, match=text):
        function(*args, **kw)


@on_all
def test_an_average_of_small_integers_does_not_overflow(rank, size):
    assert allreduce(torch.full((4,), 250, dtype=torch.uint8)).tolist() == [250] * 4
    big = 2**60 + 1  # beyond what a float64 holds
    assert allreduce(torch.full((4,), big)).tolist() == [big] * 4
    assert allreduce(torch.full((4,), -2), op=Average).tolist() == [-2] * 4


@on_all
def test_average_is_deprecated_and_excludes_op(rank, size):
    with pytest.warns(DeprecationWarning, match="use op=Average"):
        assert allreduce(torch.ones(1), average=False) == 3.0
    raises(ValueError, "both given", allreduce, torch.ones(1), average=True, op=Sum)


@on_all
def test_invalid_arguments_are_refused_before_any_message_is_sent(rank, size):
    one = torch.ones(1)
    raises(TypeError, "uint8", allreduce, torch.ones(1, dtype=torch.bool))
    raises(TypeError, "view_as_real", allreduce, torch.ones(1, dtype=torch.complex64))
    raises(ValueError, "Adasum", allreduce, one, op=Adasum)
    raises(ValueError, "pass Average", allreduce, one, op=17)
    raises(ValueError, "between 0 and 2", broadcast, one, 3)
    raises(ValueError, "between 0 and 2", broadcast_, one, -1)
    raises(ValueError, "at least 1 dim", allgather, torch.tensor(1.0))
    raises(ValueError, "at least 1 dim", alltoall, torch.tensor(1.0))
    raises(ValueError, "at least 1 dim", reducescatter, torch.tensor(1.0))
    raises(ValueError, "pass splits", alltoall, torch.ones(4))
    raises(ValueError, "one per rank", alltoall, torch.ones(4), [4])
    raises(ValueError, "a negative number or exceed", alltoall, torch.ones(4), [4, 4, 4])
    raises(ValueError, "int32", alltoall, torch.ones(3), torch.tensor([1, 1, 1]))
    raises(ValueError, "Average or Sum", reducescatter, one, op=Max)
    raises(ValueError, "at least one", grouped_allreduce, [])
    raises(ValueError, "one device", grouped_allreduce, [one, torch.ones(1, device="meta")])
    raises(ValueError, "pass a ProcessSet", allreduce, one, process_set=object())
    assert allreduce(one, op=Sum, process_set=global_process_set) == 3.0
    assert (global_process_set.rank(), global_process_set.size()) == (rank, size)
    assert global_process_set.included()


@on_all
def test_lazily_conjugated_tensor_is_sent_with_its_values(rank, size):
    mine = torch.full((size,), complex(rank, 1)).conj()
    assert mine.is_conj()
    expected = [complex(each, -1) for each in range(size)]
    assert allgather(mine[:1]).tolist() == expected
    exchanged = alltoall(mine)
    assert isinstance(exchanged, torch.Tensor)
    assert exchanged.tolist() == expected
    assert broadcast(mine, 1).tolist() == [1 - 1j] * size
    assert broadcast_(mine if rank else torch.zeros(size) + 0j, 1).tolist() == [1 - 1j] * size
    received = torch.zeros(size, dtype=torch.complex64).conj()
    assert broadcast_(received + 5j if rank == 1 else received, 1).tolist() == [5j] * size


@on_all
def test_handles_of_a_lost_world_raise(rank, size):
    kept = allreduce_async(torch.ones(1), name="kept", op=Sum)
    barrier()
    recovery = lifecycle.current().session.recovery
    recovery.generation += 1
    try:
        assert poll(kept)
        raises(PeerLost, "handle", synchronize, kept)
    finally:
        recovery.generation -= 1


@on_all
def test_named_collectives_of_mixed_sizes_match_in_any_order(rank, size):
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


# ---- objects, parameters, optimizer state ------------------------------------------------------


@on_all
def test_broadcast_parameters_handles_mixed_dtypes_and_refuses_unsupported_values(rank, size):
    half = torch.full((3,), float(rank), dtype=torch.float16)
    mask = torch.tensor([rank == 1, True, False])
    broadcast_parameters({"half": half, "mask": mask}, root_rank=1)
    assert half.tolist() == [1.0] * 3 and mask.tolist() == [True, True, False]
    broadcast_parameters([], 0)
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
    raises(ValueError, "optimizers differ between ranks", broadcast_optimizer_state, other, 0)
