"""torch's default device and default dtype belong to the script: our code does not depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works
from elastic.runtime import lifecycle


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def ones(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float32, device="cpu", **kwargs)


def the_usual_things(rank: int, size: int) -> None:
    """With everything of the script's own on the CPU."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2, device="cpu", dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    sampler = hvd.elastic.ElasticSampler(list(range(8 * size)), shuffle=True)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=rank)
    state.sync()
    assert state.epoch == 0
    assert len(list(sampler)) == 8
    for _ in range(2):
        optimizer.zero_grad()
        model(ones(4, 3) * (rank + 1)).sum().backward()
        optimizer.step()
    state.commit()
    assert hvd.broadcast_object({"from": rank}, root_rank=1) == {"from": 1}
    assert hvd.allgather_object("x" * rank) == ["x" * each for each in range(size)]
    assert hvd.allgather(ones(rank + 1)).shape == (size * (size + 1) // 2,)
    assert hvd.alltoall(ones(size), [1] * size)[1].tolist() == [1] * size
    assert hvd.reducescatter(ones(size), op=hvd.Sum).tolist() == [size]
    if size != 3:
        assert hvd.allreduce(ones(5), op=hvd.Adasum).tolist() == [1] * 5
    if size > 2:
        pair = hvd.add_process_set([0, 1])
        if rank < 2:
            assert hvd.allreduce(ones(2), op=hvd.Sum, process_set=pair).tolist() == [2, 2]
        hvd.remove_process_set(pair)
    hvd.barrier()
    total = [torch.zeros_like(each) for each in model.parameters()]
    for held, each in zip(total, model.parameters(), strict=True):
        held.copy_(hvd.allreduce(each.detach(), op=hvd.Max) - each.detach())
    assert not any(each.any() for each in total), "the ranks' weights differ"


@everywhere()
def test_collectives_work_with_a_different_default_device(rank, size):
    with default_device("meta"):
        the_usual_things(rank, size)
    works(size)


@everywhere(2)
def test_collectives_work_with_a_different_default_dtype(rank, size):
    with default_dtype(torch.float64):
        the_usual_things(rank, size)
    works(size)


@everywhere(2)
def test_device_without_collectives_is_refused_before_any_message_is_sent(rank, size):
    for call in (
        lambda: hvd.allreduce(torch.ones(2, device="meta")),
        lambda: hvd.broadcast_(torch.ones(2, device="meta"), 0, name="meta"),
        lambda: hvd.allgather_async(torch.ones(2, device="meta")),
    ):
        with raises(ValueError, "meta", "cpu or cuda"):
            call()
    assert not lifecycle.current().broken
    works(size)
