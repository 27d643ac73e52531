"""broadcast_parameters, broadcast_optimizer_state, and objects: all ranks end with exactly the state of one."""

from __future__ import annotations

import re
from typing import Any

import torch

import horovod.torch as hvd
from conformance.worlds import everywhere, raises, works


def same_everywhere(value: Any) -> bool:
    """Compared by repr, which shows every digit of a float32."""
    torch.set_printoptions(precision=9, threshold=10_000)
    texts = hvd.allgather_object(re.sub("cuda:[0-9]+", "its own GPU", repr(value)))
    return len(set(texts)) == 1


def model_of(rank: int) -> Any:
    torch.manual_seed(rank)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


@everywhere()
def test_broadcast_parameters_sends_the_parameters_of_any_root(rank, size):
    for root in range(size):
        model = model_of(rank)
        wanted = model_of(root)
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        for mine, theirs in zip(
            model.state_dict().values(), wanted.state_dict().values(), strict=True
        ):
            assert torch.equal(mine, theirs), root
        model = model_of(rank)
        hvd.broadcast_parameters(model.named_parameters(), root_rank=root)
        for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine, theirs), root


@everywhere(2)
def test_a_list_of_parameters_needs_no_names(rank, size):
    model, wanted = model_of(rank), model_of(1)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@everywhere(2)
def test_sync_distributes_the_remaining_samples_over_all_ranks(rank, size):
    for synced in (hvd.elastic.TorchState.sync, lambda state: state._handlers["sampler"].sync()):
        sampler = hvd.elastic.ElasticSampler(list(range(16)), shuffle=False)
        state = hvd.elastic.TorchState(sampler=sampler)
        sampler.record_batch(0, 2)
        state.commit()
        synced(state)
        assert len(sampler) == 6
        assert list(sampler) == list(range(4 + rank, 16, size))


@everywhere()
def test_none_entries_of_parameters_are_skipped(rank, size):
    tensor = torch.full((2,), float(rank))
    hvd.broadcast_parameters({"w": tensor, "absent": None}, root_rank=1)
    assert tensor.tolist() == [1.0, 1.0]
    with raises((TypeError, ValueError)):
        hvd.broadcast_parameters(model_of(0).parameters(), root_rank=0)
    works(size)


@everywhere()
def test_optimizer_state_of_every_kind_is_broadcast(rank, size):
    """Only the root has trained; options differ, too. Weights stay as they are."""
    makers = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1)),
        "momentum": lambda p: torch.optim.SGD(
            p, lr=0.1 * (rank + 1), momentum=0.9, weight_decay=0.1
        ),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.01 * (rank + 1), betas=(0.9, 0.9 + rank / 100)),
        "fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1 * (rank + 1)), fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01 * (rank + 1), amsgrad=True),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
        "Adadelta": lambda p: torch.optim.Adadelta(p),
        "Adamax": lambda p: torch.optim.Adamax(p),
        "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        "Rprop": lambda p: torch.optim.Rprop(p),
        "NAdam": lambda p: torch.optim.NAdam(p),
        "RAdam": lambda p: torch.optim.RAdam(p),
    }
    for told, make in makers.items():
        model = model_of(rank)
        optimizer = make(model.parameters())
        if rank == 1:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.rand(4, 3)).sum().backward()
                optimizer.step()
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        had_state = bool(optimizer.state)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert all(map(torch.equal, before, model.parameters())), f"{told}: weights moved"
        for parameter in model.parameters():
            left = None if parameter.grad is None else parameter.grad.any().item()
            assert left is (None if had_state else False), f"{told}: {left}"
        assert same_everywhere(optimizer.state_dict()), told
    lbfgs = torch.optim.LBFGS(model_of(0).parameters())
    with raises(ValueError, "LBFGS"):
        hvd.broadcast_optimizer_state(lbfgs, root_rank=0)
    works(size)


@everywhere()
def test_joining_rank_trains_equally_after_model_and_optimizer_broadcast(rank, size):
    """Model first, then optimizer, as scripts do: with weight decay and a changed learning rate, all stay equal."""
    model = model_of(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.5)
    if rank == 0:
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.25
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    distributed.zero_grad()
    model(torch.full((2, 3), float(rank))).square().sum().backward()
    distributed.step()
    assert same_everywhere([p.tolist() for p in model.parameters()])


@everywhere()
def test_objects_are_broadcast_and_gathered(rank, size):
    own = {"rank": rank, "list": [None, 1.5, "ü"], "blob": b"x" * (1000 * rank)}
    for root in range(size):
        got = hvd.broadcast_object(own, root_rank=root, name="settings")
        assert got["rank"] == root and len(got["blob"]) == 1000 * root
    assert hvd.broadcast_object(own)["rank"] == 0
    gathered = hvd.allgather_object(own, name="settings")
    assert [each["rank"] for each in gathered] == list(range(size))
    assert [len(each["blob"]) for each in hvd.allgather_object(own)] == [
        1000 * r for r in range(size)
    ]
    function = hvd.broadcast_object(lambda x: x + 7 * rank, root_rank=1)
    assert function(1) == 8
    assert hvd.broadcast_object(None, root_rank=0) is None


# ---- compression -----------------------------------------------------------------------------------------------------


@everywhere()
def test_compressors_restore_the_dtype(rank, size):
    for compressor, dtype in (
        (hvd.Compression.none, None),
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        for source in (torch.float32, torch.float64, torch.float16, torch.int32):
            tensor = torch.arange(4).to(source)
            small, context = compressor.compress(tensor)
            if dtype is not None and source in (torch.float32, torch.float64):
                assert small.dtype == dtype, (compressor, source)
            else:
                assert small.dtype == source, (compressor, source)
            back = compressor.decompress(small, context)
            assert back.dtype == source and torch.equal(back, tensor), (compressor, source)
        result = hvd.allreduce(torch.full((3,), 1.5), compression=compressor, op=hvd.Sum)
        assert result.dtype == torch.float32 and result.tolist() == [1.5 * size] * 3


class Halved:
    """A user's own: values in steps of a half travel as whole numbers."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor * 2).to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor.to(context) / 2


@everywhere()
def test_custom_compressor_is_used_by_allreduce_and_optimizer(rank, size):
    result = hvd.allreduce(torch.tensor([0.5, 2.0]), compression=Halved, op=hvd.Sum)
    assert result.tolist() == [0.5 * size, 2.0 * size]
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=Halved, op=hvd.Sum
    )
    (weight * (rank + 0.5)).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-sum(r + 0.5 for r in range(size))] * 2
