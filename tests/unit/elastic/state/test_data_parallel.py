"""DistributedDataParallel in a state: names, another reducer, and a refusal. In a world of torch's own, of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import Invalid, NotReduced
from elastic.exact.shards import Shards
from elastic.state import TorchState
from elastic.state.handlers.data_parallel import rebuild_reducer
from harness.golden import raises

distributed: Any = torch.distributed


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ddp_module_is_committed_and_restored():
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    state = TorchState(model=model)
    assert [line.split()[0] for line in state.layout().splitlines()] == [
        "model.weight",
        "model.bias",
    ]
    before = model.module.weight.detach().clone()
    with torch.no_grad():
        model.module.weight.add_(1)
    state.restore()
    assert torch.equal(model.module.weight, before)


def test_restore_sets_the_training_mode_of_the_wrapper_on_its_modules():
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    state = TorchState(model=model)
    model.eval()
    state.restore()
    assert all(each.training for each in model.modules())


def test_ddp_model_is_refused_with_shards():
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    with raises(Invalid):
        TorchState(model=model, shards=Shards(2))


def test_reducer_can_be_replaced_during_a_pass():
    model: Any = DistributedDataParallel(torch.nn.Linear(2, 1), static_graph=True)
    called = []

    def hook(state, bucket):  # torch looks at annotations
        called.append(bucket.index())
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook([], hook)
    model(torch.ones(3, 2)).sum()  # its backward pass never comes
    first = model.reducer
    state = TorchState(model=model)
    state.on_reset()
    assert model.reducer is not first
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 2), 3.0))
    assert called == [0, 0], "the hook is called, and by one reducer"


def test_nested_ddp_model_gets_a_new_reducer_on_reset():
    inner = DistributedDataParallel(torch.nn.Linear(2, 1))
    first = inner.reducer
    state = TorchState(model=torch.nn.Sequential(inner))
    state.on_reset()
    assert inner.reducer is not first


@pytest.mark.slow  # the import
def test_fabric_model_is_handled_as_its_wrapped_network():
    pytest.importorskip("lightning", reason="pip install hvd-elastic[lightning]")
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.wrappers import _FabricModule

    network = torch.nn.Linear(2, 1)
    inner = DistributedDataParallel(network)
    first = inner.reducer
    state = TorchState(model=_FabricModule(inner, DDPStrategy(), network))
    assert [line.split()[0] for line in state.layout().splitlines()] == [
        "model.weight",
        "model.bias",
    ]
    state.on_reset()
    assert inner.reducer is not first


def test_builtin_comm_hook_is_kept_by_rebuilding_the_reducer():
    model: Any = DistributedDataParallel(torch.nn.Linear(2, 1))
    model._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)
    rebuild_reducer(model)
    rebuild_reducer(model)
    (hook,) = [hook.__name__ for hook, _ in model._comm_hooks]
    assert hook == "fp16_compress_hook"
    with raises(RuntimeError):
        model._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)


def register(net: Any) -> None:
    net.register_parameter("late", torch.nn.Parameter(torch.zeros(4)))


def replace(net: Any) -> None:
    net[0].weight = torch.nn.Parameter(torch.zeros(1, 2))


def unfreeze(net: Any) -> None:
    net[1].weight.requires_grad_(True)


LATE = [(register, "model.late"), (replace, "model.0.weight"), (unfreeze, "model.1.weight")]


def two_layers() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    net[1].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize(("change", "name"), LATE)
@pytest.mark.parametrize("held", [False, True])
def test_a_parameter_that_is_trained_since_ddp_was_built_is_named_by_the_next_commit(
    change, name, held
):
    model = DistributedDataParallel(two_layers())
    state = TorchState(model=torch.nn.ModuleDict({"inner": model}) if held else model)
    state.save()
    change(model.module)
    with pytest.raises(NotReduced) as refused:
        state.save()
    parts = refused.value.parameter.split(".")
    assert [each for each in parts if each not in ("inner", "module")] == name.split(".")


@pytest.mark.parametrize(("change", "name"), LATE)
def test_parameter_trained_after_ddp_was_built_is_refused_at_creation_and_reset(change, name):
    model = DistributedDataParallel(two_layers())
    state = TorchState(model=model)
    change(model.module)
    with pytest.raises(NotReduced):
        state.on_reset()
    if change is replace:
        return  # as many parameters as there were
    model = DistributedDataParallel(two_layers())
    change(model.module)
    with pytest.raises(NotReduced):
        TorchState(model=model)


def test_rebuilt_ddp_model_reduces_its_new_parameters():
    net = two_layers()
    state = TorchState(model=DistributedDataParallel(net))
    register(net)
    unfreeze(net)
    state.model = DistributedDataParallel(net)
    state.save()


def test_parameters_and_buffers_may_be_removed_frozen_and_thawed():
    model: Any = DistributedDataParallel(two_layers(), find_unused_parameters=True)
    state = TorchState(model=model)
    net = model.module
    net.register_buffer("late", torch.zeros(3))
    net[0].weight.requires_grad_(False)
    state.save()
    state.on_reset()
    assert not net[0].weight.requires_grad
    net[0].weight.requires_grad_(True)
    state.save()
    model(torch.ones(3, 2)).sum().backward()
    assert net[0].weight in reduced(model)
    net[0].bias = None
    state.save()
    state.on_reset()


def reduced(model: Any) -> list[torch.Tensor]:
    """What the reducer in C++ has."""
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return Held([each for bucket in buckets for each in bucket.parameters()])


class Held(list[torch.Tensor]):
    """Knows tensors by what they are, not by their elements."""

    def __contains__(self, tensor: object) -> bool:
        return any(each is tensor for each in self)
