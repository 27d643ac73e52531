"""Reuse of DTensor's sharding decisions in another mesh, compared with the decisions of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from elastic.sharding.dtensor_operators import OperatorDecisions
from harness.fakes.process_group import only_rank

SHAPES = [(24, 3), (24,), (5, 2), (1,), (2, 2, 2)]  # some with fewer rows than ranks
MESHES = [(1,), (2,), (3,), (8,), (2, 2), (1, 3), (4, 2), (2, 1)]

PROPAGATOR = DTensor._op_dispatcher.sharding_propagator
DECIDE = PROPAGATOR.propagate_op_sharding_non_cached


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    """A default group of eight ranks without communication, in which this process has rank 0."""
    with only_rank(0, 8):
        yield
    _clear_sharding_prop_cache()


def mesh_of(shape: tuple[int, ...]) -> Any:
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return distributed.device_mesh.DeviceMesh("cpu", ranks)


def sharded(mesh: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    rows = -(-shape[0] // mesh.shape[-1])
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    strides = torch.empty(shape, device="meta").stride()
    local = torch.ones(rows, *shape[1:], dtype=dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def optimizer_step(kind: Any, **options: Any) -> Callable[[Any], None]:
    def run(mesh: Any) -> None:
        parameters = [torch.nn.Parameter(sharded(mesh, shape)) for shape in SHAPES]
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer = kind(parameters, lr=0.1, **options)
        for _ in range(2):
            optimizer.step()

    return run


def other_operators(mesh: Any) -> None:
    """Operators whose tensors differ in shape, dtype or placements, or that are not elementwise."""
    weight, bias = sharded(mesh, (8, 8)), sharded(mesh, (8,))
    (weight * bias).sum()
    weight.lerp_(weight.clone(), 0.5).clamp_(-1, 1).pow(2).to(torch.bfloat16)
    weight + sharded(mesh, (8, 8), torch.float64)
    weight.mul(torch.tensor(2.0)).mul(3).mul(3.5)
    weight.mean(0) + bias
    weight.t() + weight
    if mesh.ndim == 2:
        for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)]):
            DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False).mul_(2).exp()


NOT_ELEMENTWISE = {"aten::ones_like", "aten::zeros_like", "aten::detach", "aten::alias"}
RUNS: dict[str, Callable[[Any], None]] = {
    "SGD": optimizer_step(torch.optim.SGD, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD foreach": optimizer_step(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": optimizer_step(torch.optim.AdamW, foreach=False),
    "AdamW foreach": optimizer_step(torch.optim.AdamW, amsgrad=True, foreach=True),
    "RMSprop foreach": optimizer_step(torch.optim.RMSprop, momentum=0.9, foreach=True),
    "Adagrad": optimizer_step(torch.optim.Adagrad, foreach=False),
    "others": other_operators,
}
NIGHTLY = ("SGD", "AdamW", "RMSprop foreach", "Adagrad")


def decisions_of_torch(run: Callable[[Any], None], mesh: Any) -> list[tuple[Any, Any]]:
    """Run operators, and return the schema and torch's decision for each."""
    found = []

    def decide(schema: Any) -> Any:
        decision = DECIDE(schema)
        found.append((schema, decision))
        return decision

    _clear_sharding_prop_cache()
    with patch.object(PROPAGATOR, "propagate_op_sharding_non_cached", decide):
        run(mesh)
    return found


class Counted:
    """Decisions that are reused, and how many of them torch had to make."""

    def __init__(self) -> None:
        self.asked: list[str] = []  # operators
        from torch.distributed.tensor._ops import _pointwise_ops as elementwise

        operators = {*elementwise.pointwise_ops, *elementwise._specially_registered_ops}
        self.decide = OperatorDecisions(self._ask, operators)

    def _ask(self, schema: Any) -> Any:
        self.asked.append(schema.op.name())
        return DECIDE(schema)


def fields(decision: Any) -> tuple[Any, ...]:
    spec = decision.output_spec
    specs = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    meshes = [None if each is None else id(each.mesh) for each in specs]
    redistributed = decision.redistribute_schema
    arguments = None if redistributed is None else redistributed.args_schema
    return specs, meshes, decision.needs_redistribute, arguments


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name, run in RUNS.items()
    ],
)
def test_decision_for_any_mesh_equals_the_decision_of_torch(run):
    reused = Counted()
    total = 0
    for mesh in map(mesh_of, MESHES):
        for schema, decision in decisions_of_torch(run, mesh):
            total += 1
            assert fields(reused.decide(schema)) == fields(decision), schema
    assert len(reused.asked) < total


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_step_in_a_new_mesh_needs_no_decision_of_torch(foreach):
    run = optimizer_step(torch.optim.AdamW, foreach=foreach)
    reused = Counted()
    with (
        patch.object(PROPAGATOR, "propagate_op_sharding_non_cached", reused.decide),
        patch(f"{__name__}.SHAPES", [(24, 3), (24,), (7, 2)]),
    ):
        run(mesh_of((4,)))
        first = set(reused.asked)
        for size in (3, 2):
            _clear_sharding_prop_cache()
            reused.asked.clear()
            run(mesh_of((size,)))
            assert set(reused.asked) <= NOT_ELEMENTWISE
    assert first - NOT_ELEMENTWISE
