"""DistributedOptimizer with zero=1: parts of optimizers among threads, beside the whole optimizer in one process."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

from elastic.collectives.interface import Op
from elastic.errors import Invalid, NotElastic, NotPicklable
from elastic.exact.shards import Shards
from elastic.negotiation.process_sets import ProcessSet
from elastic.optimizer import zero1_optimizer
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.join import join
from elastic.runtime import lifecycle
from elastic.sharding.shard_division import Division
from elastic.state.fully_sharded.zero_handlers import DividedOptimizerHandler
from harness.small_worlds import Rounding, net, take_steps, train_once

WIDTHS = 5, 7, 1
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"amsgrad": True},
}


def made(kind: str, model: Any, **options: Any) -> Any:
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **OPTIONS.get(kind, {}))
    return DistributedOptimizer(optimizer, model.named_parameters(), zero=1, **options)


def whole(kind: str, steps: int) -> list[torch.Tensor]:
    model = net(*WIDTHS)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **OPTIONS.get(kind, {}))
    take_steps(model, optimizer, steps)
    return [each.detach() for each in model.parameters()]


def entry_bytes(optimizer: Any) -> int:
    return sum(
        entry.nbytes for kept in optimizer.state.values() for entry in kept.values() if entry.dim()
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", zero1_optimizer.ELEMENTWISE)
def test_all_ranks_have_the_parameters_of_an_undivided_optimizer(threads, kind: str, size: int):
    def train(rank: int) -> tuple[list[torch.Tensor], int]:
        model = net(*WIDTHS)
        optimizer = made(kind, model)
        take_steps(model, optimizer, 4)
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        return [each.detach() for each in model.parameters()], entry_bytes(optimizer)

    wanted = whole(kind, 4)
    found = threads(size, train)
    for parameters, _ in found:
        for ours, theirs in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # a mean over 3 ranks
    elements = sum(each.numel() for each in wanted)
    largest, all_bytes = max(n for _, n in found), sum(n for _, n in found)
    assert largest <= all_bytes / size * (1 + size * len(wanted) / elements)


def test_parameters_beyond_the_gather_limit_are_gathered_in_several_pieces(threads, monkeypatch):
    monkeypatch.setattr(zero1_optimizer, "GATHERED_BYTES", 12)  # three elements

    def train(rank: int) -> list[torch.Tensor]:
        model = net(*WIDTHS)
        take_steps(model, made("Adam", model), 2)
        return [each.detach() for each in model.parameters()]

    for parameters in threads(3, train):
        for ours, theirs in zip(parameters, whole("Adam", 2), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_groups_frozen_parameters_schedules_and_closures_work_as_in_the_whole_optimizer(threads):
    def steps(zero: int) -> list[torch.Tensor]:
        model = net(*WIDTHS)
        first, *others = model.parameters()
        first.requires_grad_(False)
        groups = [{"params": others[:1]}, {"params": [first, *others[1:]], "lr": 0.3}]
        optimizer: Any = torch.optim.Adam(groups, lr=0.05)
        if zero:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), zero=1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(1, WIDTHS[0])).sum()
            loss.backward()
            return loss

        for _ in range(3):
            assert torch.is_tensor(optimizer.step(closure))
            schedule.step()
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.3 / 8)
        return [each.detach() for each in model.parameters()]

    wanted = steps(0)
    for parameters in threads(2, lambda rank: steps(1)):
        assert all(map(torch.allclose, parameters, wanted))


def test_state_of_a_whole_optimizer_is_loaded_in_parts(threads):
    model = net(*WIDTHS)
    plain = torch.optim.Adam(model.parameters(), lr=0.05)
    take_steps(model, plain, 2)
    saved = copy.deepcopy(plain.state_dict())
    weights = [each.detach().clone() for each in model.parameters()]
    take_steps(model, plain, 2)

    def go_on(rank: int) -> list[torch.Tensor]:
        mine = net(*WIDTHS)
        with torch.no_grad():
            for each, value in zip(mine.parameters(), weights, strict=True):
                each.copy_(value)
        optimizer = made("Adam", mine)
        optimizer.load_state_dict(copy.deepcopy(saved))  # which torch does not copy
        take_steps(mine, optimizer, 2)
        with pytest.raises(Invalid):
            optimizer.state_dict()
        return [each.detach() for each in mine.parameters()]

    for parameters in threads(3, go_on):
        assert all(map(torch.allclose, parameters, model.parameters()))


class NormOfAll(torch.optim.SGD):
    """An update of one element depends on others."""


def test_optimizers_and_options_that_cannot_be_divided_are_refused(world):
    model = net(*WIDTHS)
    for optimizer in (
        NormOfAll(model.parameters(), lr=0.1),
        torch.optim.Adafactor(model.parameters()),
        torch.optim.LBFGS(model.parameters()),
    ):
        with pytest.raises(Invalid):
            DistributedOptimizer(optimizer, model.named_parameters(), zero=1)
    across = torch.nn.Parameter(torch.zeros(3, 4).t())
    with pytest.raises(Invalid):
        DistributedOptimizer(torch.optim.SGD([across], lr=0.1), [("across", across)], zero=1)
    for options in (
        {"zero": 2},
        {"zero": 1, "shards": Shards(4)},
        {"zero": 1, "sparse_as_dense": True},
        {"zero": 1, "op": int(Op.ADASUM)},
        {"zero": 1, "process_set": ProcessSet([0])},
    ):
        with pytest.raises(Invalid):
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
            )


def test_step_in_a_world_without_a_matching_division_is_refused(world):
    model = net(*WIDTHS)
    optimizer = made("SGD", model)
    before = [each.detach().clone() for each in model.parameters()]
    world.become(1)
    with pytest.raises(NotElastic):
        train_once(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_divided_optimizer_cannot_be_copied_or_pickled(world):
    optimizer = made("SGD", net(*WIDTHS))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotPicklable):
            copied(optimizer)


def test_join_is_refused_with_a_divided_optimizer(world):
    optimizer = made("SGD", net(*WIDTHS))
    with pytest.raises(Invalid):
        join()
    assert optimizer.zero_order == (0, 1)


def test_a_dropped_optimizer_that_waits_for_the_collector_does_not_prevent_join():
    lifecycle.init()
    gc.collect()
    gc.disable()
    try:
        optimizer = made("SGD", net(*WIDTHS))
        optimizer.itself = optimizer
        del optimizer
        assert join() == 0
    finally:
        gc.enable()
        lifecycle.shutdown()


def test_divided_optimizer_with_compression_and_passes_equals_the_undivided_one(threads):
    def trained(zero: int) -> list[list[torch.Tensor]]:
        def train(rank: int) -> list[torch.Tensor]:
            model = net(*WIDTHS)
            optimizer: Any = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05),
                model.named_parameters(),
                zero=zero,
                compression=Rounding,
                backward_passes_per_step=2,
            )
            for _ in range(2):
                optimizer.zero_grad()
                for batch in (1.0 + rank, 3.0):
                    model(torch.full((1, WIDTHS[0]), batch)).sum().backward()
                optimizer.step()
            return [each.detach() for each in model.parameters()]

        found: list[list[torch.Tensor]] = threads(2, train)
        return found

    for divided, undivided in zip(trained(1), trained(0), strict=True):
        assert all(map(torch.allclose, divided, undivided))


def test_entries_of_another_world_size_are_concatenations_of_the_parts(threads):
    def parts(rank: int) -> dict[str, Any]:
        model = net(*WIDTHS)
        optimizer = made("Adam", model)
        handler = DividedOptimizerHandler(optimizer, "optimizer")
        handler.follow(Division.among(optimizer.zero_order, rank))
        take_steps(model, optimizer, 2)
        return {name: each.local.clone() for name, each in handler.live_shards().items()}

    three, (one,) = threads(3, parts), threads(1, parts)
    assert len(one) == 8  # exp_avg and exp_avg_sq of four parameters
    for name, entry in one.items():
        assert torch.allclose(torch.cat([part[name] for part in three]), entry)
