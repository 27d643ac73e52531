"""Sharded state is found in modules, optimizers and states, and refused in another world."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

import elastic
from elastic.errors import Fixed, Invalid, NotElastic, Unsupported
from elastic.exact.shards import Shards
from elastic.sharding import fsdp2, tested_torch, unsupported_sharding
from elastic.state import TorchState
from elastic.torch_backend import sharding_guard
from harness.fakes.process_group import only_rank

pytestmark = [
    pytest.mark.slow,  # imports of torch's
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def four():
    """A mesh of four ranks, three of which are fake."""
    with only_rank(0, 4):
        yield distributed.device_mesh.init_device_mesh("cpu", (4,))


def network() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def tensor_parallel(mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(network(), mesh, {"0": ColwiseParallel()})


def fully_sharded(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(network(), mesh=mesh)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def over_two_of_three_dimensions(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    three = distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor")
    )
    return fully_shard(network(), mesh=three["replicate", "shard"])


def over_several_meshes(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    two = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = network()
    fully_shard(model[0], mesh=two)
    return fully_shard(model, mesh=mesh)


def over_some_ranks(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    two = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return fully_shard(network(), mesh=two["b"])


def along_columns(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    return fully_shard(
        network(), mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None
    )


def regathered_by_two(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(network(), mesh=mesh, reshard_after_forward=2)


def partly_tensor_parallel(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = tensor_parallel(mesh)
    fully_shard(model[1], mesh=mesh)
    return model


def replicated(mesh: Any) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate(network())


def replicated_by_fsdp2(mesh: Any) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(network(), mesh=mesh)


def with_sharded_buffer(mesh: Any) -> Any:
    model = network()
    model.register_buffer("table", sharded(mesh))
    return model


def fully_sharded_with_sharded_buffer(mesh: Any) -> Any:
    model = fully_sharded(mesh)
    model.register_buffer("table", sharded(mesh))
    return model


def sharded(mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.ones(8), mesh, [Shard(0)])


def with_divide_factor(mesh: Any) -> Any:
    model = fully_sharded(mesh)
    model.set_gradient_divide_factor(4.0)
    return model


def with_all_reduce_hook(mesh: Any) -> Any:
    model = fully_sharded(mesh)
    model.set_all_reduce_hook(lambda gradient: None)
    return model


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (replicated, Fixed.REPLICA),
        (replicated_by_fsdp2, Fixed.MODULE),
        (with_sharded_buffer, Fixed.PARAMETERS),
        (fully_sharded_with_sharded_buffer, Fixed.MODULE),
        (with_divide_factor, Fixed.MODULE),
        (with_all_reduce_hook, Fixed.MODULE),
    ],
)
def test_model_bound_to_one_world_when_put_into_a_state_then_refused(four, made, kind):
    model = made(four)
    with pytest.raises(NotElastic) as refused:
        TorchState(model=model)
    assert refused.value.kind is kind


def test_factor_that_no_world_changes_when_put_into_a_state_then_accepted(four):
    model = fully_sharded(four)
    model.set_gradient_divide_factor(1.0)
    assert TorchState(model=model).is_sharded()


def by_fsdp1(mesh: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("made", "kind"),
    [(replicated, Fixed.REPLICA), (replicated_by_fsdp2, Fixed.MODULE), (by_fsdp1, Fixed.MODULE)],
)
def test_model_bound_to_one_world_outside_of_a_state_when_training_begins_then_refused(
    four, made, kind
):
    model = made(four)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.begin([])
    assert refused.value.kind is kind
    del model


def test_sharded_model_in_another_state_when_training_begins_then_refused(four):
    other = TorchState(model=fully_sharded(four))
    with pytest.raises(NotElastic) as refused:
        sharding_guard.begin(TorchState(step=0).handled())
    assert refused.value.kind is Fixed.MODULE
    sharding_guard.begin(other.handled())


def test_sharded_model_of_an_earlier_world_when_another_is_trained_then_refused(four):
    student = network()
    optimizer = sgd(student)
    sharding_guard.begin(TorchState(model=student, optimizer=optimizer).handled())
    teacher = fully_sharded(four)
    sharding_guard.check(optimizer, 2, 4)
    unsupported_sharding.enter_world()
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 3, 3)
    assert refused.value.kind is Fixed.MODULE
    del teacher, refused
    teacher = fully_sharded(four)  # which replaced it
    sharding_guard.check(optimizer, 3, 3)
    del teacher


@pytest.fixture(scope="module")
def stage_of() -> Iterator[Callable[[nn.Module], Any]]:
    """Create a stage of a module. If torch's module stayed imported, all later tests that create a state would search
    the heap for stages, which takes 50 ms of a processor.
    """
    from torch.distributed.pipelining import PipelineStage

    yield lambda module: PipelineStage(module, 0, 4, torch.device("cpu"))
    del sys.modules[PipelineStage.__module__]


def test_pipeline_stage_when_its_module_is_put_into_a_state_then_refused(four, stage_of):
    module, other = network(), network()
    stage = stage_of(module)
    with pytest.raises(NotElastic) as refused:
        TorchState(model=module)
    assert refused.value.kind is Fixed.PARAMETERS
    state = TorchState(model=other)
    with pytest.raises(NotElastic):
        sharding_guard.begin(state.handled())
    del stage, refused


def test_pipeline_stage_when_made_in_training_then_accepted_in_its_world_only(four, stage_of):
    module, other = network(), network()
    optimizer = sgd(module)
    sharding_guard.begin(TorchState(model=other).handled())
    stage = stage_of(module)
    sharding_guard.check(optimizer, 2, 4)
    of_state = stage_of(other)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 2, 4)
    assert refused.value.kind is Fixed.PARAMETERS
    del of_state, refused
    unsupported_sharding.enter_world()
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 3, 4)
    assert refused.value.kind is Fixed.MODULE
    del stage


@pytest.mark.parametrize(
    "call",
    [
        elastic.allreduce,
        elastic.allgather,
        elastic.alltoall,
        elastic.reducescatter,
        lambda tensor: elastic.broadcast(tensor, 0),
        lambda tensor: elastic.broadcast_parameters({"table": tensor}, 0),
        lambda tensor: elastic.grouped_allreduce([torch.ones(1), tensor]),
    ],
)
def test_dtensor_when_passed_to_a_collective_then_refused(four, monkeypatch, call):
    monkeypatch.delenv("RANK", raising=False)
    elastic.init()
    with pytest.raises(Unsupported):
        call(sharded(four))
    elastic.shutdown()


@pytest.mark.parametrize("options", [{}, {"zero": 1}])
def test_optimizer_of_dtensors_when_wrapped_in_distributed_optimizer_then_refused(
    four, monkeypatch, options
):
    monkeypatch.delenv("RANK", raising=False)
    elastic.init()
    model = fully_sharded(four)
    with pytest.raises(Invalid):
        elastic.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    elastic.shutdown()


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (tensor_parallel, Fixed.PARAMETERS),
        *(
            (each, Fixed.MODULE)
            for each in (
                over_two_of_three_dimensions,
                over_several_meshes,
                over_some_ranks,
                along_columns,
                regathered_by_two,
                partly_tensor_parallel,
            )
        ),
    ],
)
def test_state_refuses_unsupported_kinds_of_sharding(four, made, kind):
    model = made(four)
    assert unsupported_sharding.of_module(model) is kind
    for values in ({"model": model}, {"net": model}, {"optimizer": sgd(model)}):
        with pytest.raises(NotElastic) as refused:
            TorchState(**values)
        assert refused.value.kind is kind


def test_diloco_when_torch_has_other_private_names_then_a_fully_sharded_model_is_refused(
    four, monkeypatch
):
    model = fully_sharded(four)
    monkeypatch.setattr(tested_torch, "TESTED", ("2.9",))
    monkeypatch.setattr(fsdp2, "groups", None)
    with pytest.raises(Invalid):
        elastic.DiLoCo(model, sgd(model), every=2)


def test_fully_sharded_model_is_accepted_only_with_tested_versions_of_torch(four, monkeypatch):
    model = fully_sharded(four)
    with pytest.raises(NotElastic):
        TorchState(optimizer=sgd(model))  # whose model is in no state
    monkeypatch.setattr(tested_torch, "TESTED", ("2.9",))
    monkeypatch.setattr(fsdp2, "groups", None)  # uses names of torch that another version may lack
    with pytest.raises(NotElastic) as refused:
        TorchState(model=model)
    assert refused.value.kind is Fixed.MODULE
    monkeypatch.undo()
    optimizer = sgd(model)
    state = TorchState(model=model, optimizer=optimizer)
    assert state.is_sharded()
    sharding_guard.begin(state.handled())
    sharding_guard.check(optimizer, 2, 4)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(sgd(model), 2, 4)  # which is in no state, although its model is
    assert refused.value.kind is Fixed.OPTIMIZER
    with pytest.raises(NotElastic):
        sharding_guard.check(sgd(tensor_parallel(four)), 3, 3)


def test_replicated_parameters_are_not_reported_as_sharded(four):
    plain = network()
    assert unsupported_sharding.of_module(plain) is None
    assert unsupported_sharding.of_optimizer(sgd(plain)) is None
    assert not unsupported_sharding.any_fully_sharded()
    sharding_guard.check(sgd(plain), 7, 3)


def test_tensor_parallel_layers_are_trained_only_in_their_world(four):
    optimizer = sgd(tensor_parallel(four))
    sharding_guard.check(optimizer, 2, 4)
    sharding_guard.check(optimizer, 2, 4)
    for generation, size in ((3, 3), (3, 4)):  # one is lost; another one has replaced it
        with pytest.raises(NotElastic) as refused:
            sharding_guard.check(optimizer, generation, size)
        assert refused.value.kind is Fixed.PARAMETERS
    with pytest.raises(NotElastic):
        sharding_guard.check(sgd(tensor_parallel(four)), 3, 3)  # before its first step
    sharding_guard.check(sgd(tensor_parallel(four)), 3, 4)  # newly created


def test_a_fully_sharded_module_is_refused_before_training_and_at_its_first_step(four):
    optimizer = sgd(model := fully_sharded(four))
    with pytest.raises(NotElastic) as refused:
        sharding_guard.begin([])
    assert refused.value.kind is Fixed.MODULE
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 2, 4)
    assert refused.value.kind is Fixed.MODULE
    assert unsupported_sharding.of_module(model) is Fixed.MODULE


def test_fsdp1_parameters_are_recognized():
    flat, view = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    view._fsdp_flattened = True  # type: ignore[attr-defined]
    for each in (flat, view):
        assert unsupported_sharding.of_optimizer(torch.optim.SGD([each], lr=0.1)) is Fixed.MODULE


@pytest.mark.parametrize("kind", ["fsdp2", "zero"])
def test_used_shards_outside_of_a_state_are_refused_with_sharded_parameters(
    four, kind: str, monkeypatch: pytest.MonkeyPatch
):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    monkeypatch.delenv("RANK", raising=False)
    elastic.init()
    model: Any = fully_sharded(four) if kind == "fsdp2" else network()
    optimizer: Any = (
        sgd(model)
        if kind == "fsdp2"
        else ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    )
    sharding_guard.begin(TorchState(model=model, optimizer=optimizer).handled())
    unused = Shards(4)
    sharding_guard.check(optimizer, 1, 4)
    used = Shards(4)
    for _ in used:
        with pytest.raises(NotElastic):
            sharding_guard.check(optimizer, 1, 4)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 1, 4)
    assert refused.value.kind is (Fixed.PARAMETERS if kind == "fsdp2" else Fixed.OPTIMIZER)
    elastic.shutdown()
    del used, unused
