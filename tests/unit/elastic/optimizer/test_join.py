"""A rank that has joined follows the others' steps, with threads as ranks: what they get, and what it keeps."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from elastic.api.compression import Compression
from elastic.collectives.interface import Op
from elastic.errors import PeerLost, StateMismatch
from elastic.negotiation.process_sets import ProcessSet
from elastic.optimizer import join
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.gradients import gradient_reducer, plan_agreement
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from harness.golden import recorded
from harness.small_worlds import Rounding, backward, net, ranks_as_threads, sgd, small, take_steps

WAIT_S = 60.0


class Attendance:
    """What the engine tells about who has joined."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._came: list[int] = []

    def start_join(self) -> int:
        with self._changed:
            self._came.append(lifecycle.current().place.rank)
            self._changed.notify_all()
            return (len(self._came) - 1) // self._size

    def join_noted(self, turn: int) -> bool:
        return True

    def poll(self, turn: int) -> bool:
        return len(self._came) >= (turn + 1) * self._size

    def synchronize(self, turn: int) -> int:
        return self._came[(turn + 1) * self._size - 1]

    def await_joined(self, count: int) -> None:
        """Until so many have."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._came) >= count, WAIT_S)


@pytest.fixture
def world(monkeypatch):
    """``world(size, function)`` runs ``function(rank, attendance)`` on every rank."""
    threads = ranks_as_threads(monkeypatch)
    monkeypatch.setattr(join, "FORMING_S", 0.0)

    def run(size, function):
        attendance = Attendance(size)
        monkeypatch.setattr(join, "submission", attendance)
        return threads(size, lambda rank: function(rank, attendance))

    return run


def test_joined_rank_helps_no_step_before_its_join_is_known(world):
    """Who was helped joins next, and would be taken for the earlier of the two."""
    story: list[str] = []

    def run(rank, attendance):
        model, optimizer = small(3, 2, lr=0.0)
        take_steps(model, optimizer, 1)
        if rank == 0:
            looks = iter([False] * 50)

            def noted(turn: int) -> bool:
                known = next(looks, True)
                if known and not story:
                    story.append("known")
                return known

            attendance.join_noted = noted
        if rank == 1:
            attendance.await_joined(1)
            take_steps(model, optimizer, 1)
            story.append("stepped")
        return join.join()

    assert world(2, run) == [1, 1]
    assert story == ["known", "stepped"]


def meeting() -> Any:
    world: Any = lifecycle.current()
    return world.gradients


def grads(*models: torch.nn.Module) -> list[Any]:
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for model in models
        for parameter in model.parameters()
    ]


# ---- what the others get -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [(Op.AVERAGE, 4.0), (Op.SUM, 12.0), (Op.MIN, 0.0), (Op.MAX, 6.0), (Op.PRODUCT, 0.0)],
)
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
def test_joined_rank_adds_zeros_for_any_reduction(world, monkeypatch, op, expected, compression):
    monkeypatch.setattr(gradient_reducer, "FIRST_BYTES", 0)
    monkeypatch.setattr(gradient_reducer, "FULL_BYTES", 0)

    def run(rank, attendance):
        model, optimizer = small(3, 4, 2, lr=0.0, op=op, compression=compression)
        take_steps(model, optimizer, 2)
        if rank:
            attendance.await_joined(1)
            take_steps(model, optimizer, 3, scale=6.0)
        join.join()
        return model[-1].bias.grad.tolist()

    first, *others = world(3, run)
    one = {Op.SUM: 3.0}.get(op, 1.0)
    assert first == [one, one]  # of its own last step
    assert others == [[expected, expected]] * 2


def test_joined_rank_keeps_its_parameters_gradients_and_optimizer(world):
    def run(rank, attendance):
        model = net(3, 2)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        take_steps(model, optimizer, 2)
        if rank:
            attendance.await_joined(1)
            take_steps(model, optimizer, 3)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), grads(model)))
        join.join()
        after = (model.state_dict(), optimizer.state_dict(), grads(model))
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        return float(next(iter(optimizer.state.values()))["step"])

    assert world(2, run) == [2.0, 5.0]


def test_joined_rank_does_not_record_an_overflow_in_later_steps_of_its_peers(world):
    """So checkpoints compare what was before it only where all have seen it."""

    def run(rank, attendance):
        seen = lifecycle.current().first_not_finite = FirstNotFinite()
        model, optimizer = small(3, 2, lr=0.0)
        take_steps(model, optimizer, 1, scale=math.inf)
        if rank:
            attendance.await_joined(1)
            take_steps(model, optimizer, 1, scale=math.inf)
        join.join()
        found = []
        for scale in (math.inf, 1.0, math.inf):
            found.append(seen.digest())
            take_steps(model, optimizer, 1, scale=scale)
        return [*found, seen.digest()]

    first, *others = world(3, run)
    assert first[:3] == [None, None, None] and others[0] == others[1]
    assert None not in others[0][:2] and others[0][2] is None
    assert first[3] == others[0][3] is not None  # all have seen what came later


def test_epochs_after_a_join_of_all_but_one_rank_are_unaffected(world):
    def run(rank, attendance):
        model, optimizer = small(3, 2, lr=0.0)
        seen = []
        for epoch in range(3):
            take_steps(model, optimizer, 2, scale=3.0)
            if (rank, epoch) == (2, 1):
                attendance.await_joined(3 * epoch + 2)
                take_steps(model, optimizer, 2, scale=3.0)
            seen.append(float(model[0].bias.grad[0]))
            join.join()
        return seen

    assert world(3, run) == [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0], [3.0, 1.0, 3.0]]


def test_join_returns_the_last_rank_to_join(world):
    def run(rank, attendance):
        attendance.await_joined(2 - rank)
        return join.join()

    assert world(3, run) == [0, 0, 0]


def test_join_in_a_world_of_one_returns_0(world):
    def run(rank, attendance):
        model = net(3, 2)
        take_steps(model, sgd(model), 1)
        return join.join()

    assert world(1, run) == [0]


def test_joined_rank_uses_the_custom_compression(world):
    def run(rank, attendance):
        model, optimizer = small(3, 2, lr=0.0, compression=Rounding)
        take_steps(model, optimizer, 1)
        if rank:
            attendance.await_joined(1)
            take_steps(model, optimizer, 2, scale=4.2)
        join.join()
        return model[0].bias.grad.tolist()

    assert world(2, run) == [[1.0, 1.0], [2.0, 2.0]]


def test_joined_rank_follows_sparse_gradients_without_a_gradient(world):
    def run(rank, attendance):
        table: Any = torch.nn.Embedding(10, 2, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0))
        if rank:
            attendance.await_joined(1)  # the other never saw that its gradient is sparse
            for _ in range(2):
                optimizer.zero_grad()
                table(torch.tensor([4, 5])).sum().backward()
                optimizer.step()
        join.join()
        return None if table.weight.grad is None else table.weight.grad.to_dense()[4].tolist()

    assert world(2, run) == [None, [0.5, 0.5]]


# ---- plans that come and go meanwhile ------------------------------------------------------------


def test_rank_without_data_participates_from_the_first_step(world):
    def run(rank, attendance):
        model, optimizer = small(3, 2, lr=0.0)
        for _ in range(2):
            if rank:
                attendance.await_joined(1)
                take_steps(model, optimizer, 2, scale=2.0)
            join.join()
        assert grads(model)[0] is None or rank
        take_steps(model, optimizer, 1, scale=2.0)  # it finds what the others agreed on
        return float(model[0].bias.grad[0])

    assert world(2, run) == [2.0, 2.0]


def test_several_optimizers_may_step_in_any_order_and_at_different_rates(world):
    def run(rank, attendance):
        models = [net(3, 2), net(4, 2), net(5, 2)]
        optimizers = [sgd(model, lr=0.0) for model in models]
        take_steps(models[0], optimizers[0], 1)
        take_steps(models[1], optimizers[1], 1)
        if rank:
            attendance.await_joined(1)
            for number in (1, 0, 0, 2, 1, 2):  # the third for the first time
                take_steps(models[number], optimizers[number], 1, scale=2.0)
        join.join()
        for number in (2, 1, 0):
            take_steps(models[number], optimizers[number], 1, scale=5.0)
        return [float(model[-1].bias.grad[0]) for model in models]

    assert world(2, run) == [[5.0] * 3] * 2


def test_joined_rank_follows_two_backwards_before_two_steps(world):
    def run(rank, attendance):
        models = [net(3, 2), net(4, 2)]
        optimizers = [sgd(model, lr=0.0) for model in models]
        for turn in range(4):
            if turn == 2 and rank == 0:
                break
            if turn == 2:
                attendance.await_joined(1)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for model in models if rank else reversed(models):
                backward(model, scale=4.0)  # launched in another order on each rank
            for optimizer in optimizers:
                optimizer.step()
        join.join()
        return [float(model[-1].bias.grad[0]) for model in models]

    assert world(2, run) == [[4.0, 4.0], [2.0, 2.0]]


def test_parameters_may_be_thawed_and_frozen_while_a_rank_has_joined(world):
    def run(rank, attendance):
        model = net(3, 4, 2)
        model[0].requires_grad_(False)
        optimizer = sgd(model, lr=0.0)
        take_steps(model, optimizer, 1)
        if rank:
            attendance.await_joined(1)
            for _ in range(2):
                take_steps(model, optimizer, 1)
                model[0].requires_grad_(not model[0].weight.requires_grad)
                take_steps(model, optimizer, 2)
        join.join()
        take_steps(model, optimizer, 1, scale=3.0)
        return float(model[-1].bias.grad[0])

    assert world(3, run) == [3.0] * 3


def test_rejoining_rank_follows_parameters_thawed_by_its_peers(world):
    def run(rank, attendance):
        model = net(3, 4, 2)
        model[0].requires_grad_(False)
        optimizer = sgd(model, lr=0.0)
        take_steps(model, optimizer, 1)
        if rank:
            attendance.await_joined(1)
            model[0].requires_grad_(True)
            take_steps(model, optimizer, 1)
        join.join()
        take_steps(model, optimizer, 2, scale=3.0)
        return model[0].bias.grad.tolist()

    one, two = world(2, run)
    assert one == two and any(one)


def test_new_optimizer_replaces_a_deleted_one_while_a_rank_has_joined(world):
    def run(rank, attendance):
        first = net(3, 2)
        optimizer = sgd(first, lr=0.0)
        take_steps(first, optimizer, 1)
        if rank == 0:
            del optimizer
            join.join()
            return sorted(purpose for purpose, _ in meeting().made)
        attendance.await_joined(1)
        take_steps(first, optimizer, 1)
        del optimizer
        second = net(7, 5)
        take_steps(second, sgd(second, lr=0.0), 2)
        join.join()
        return second[0].bias.grad.tolist()

    purposes, gradient = world(2, run)
    assert gradient == [0.5] * 5
    recorded("messages", purposes)


def test_optimizers_that_differ_are_refused_on_every_rank(world):
    def run(rank, attendance):
        if rank == 0:
            with pytest.raises(StateMismatch):
                join.join()
            return "refused"
        attendance.await_joined(1)
        model = net(3, rank)
        with pytest.raises(StateMismatch):
            take_steps(model, sgd(model), 1)
        return "refused"

    assert world(3, run) == ["refused"] * 3


def test_sparse_gradients_without_a_sum_are_refused_on_every_rank(world):
    def run(rank, attendance):
        table: Any = torch.nn.Embedding(10, 2, sparse=True)
        kept = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0), op=Op.MAX)
        if rank == 0:
            with pytest.raises(StateMismatch):
                join.join()
            return
        attendance.await_joined(1)
        assert kept is not None  # its hooks go with it
        with pytest.raises(ValueError, match="sparse_as_dense=True"):
            table(torch.tensor([4])).sum().backward()

    world(2, run)


def test_a_world_that_breaks_ends_the_wait(world):
    def run(rank, attendance):
        model, optimizer = small(3, 2)
        take_steps(model, optimizer, 1)
        if rank == 0:
            with pytest.raises(PeerLost):
                join.join()
            return
        attendance.await_joined(1)
        meeting().abort()

    world(2, run)


# ---- process sets --------------------------------------------------------------------------------


def registered(*ranks: int) -> ProcessSet:
    members = ProcessSet(list(ranks))
    members._entry.number = 1 + ranks[0]
    return members


def test_gradients_are_averaged_within_the_set_only(world):
    def run(rank, attendance):
        model = net(3, 2)
        process_set = registered(0, 1) if rank < 2 else registered(2)
        optimizer = sgd(model, lr=0.0, process_set=process_set)
        take_steps(model, optimizer, 2, scale=float(rank))
        return float(model[0].bias.grad[0])

    assert world(3, run) == [0.5, 0.5, 2.0]


def test_optimizer_is_a_plain_one_on_a_rank_outside_of_the_process_set(world):
    def run(rank, attendance):
        model, optimizer = small(3, 2, lr=1.0, process_set=registered(0, 1))
        before = model[0].bias.tolist()[0]
        if rank == 2:
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            optimizer.zero_grad()
            backward(model, scale=3.0)
            optimizer.zero_grad()  # nothing is under way
        take_steps(model, optimizer, 1, scale=float(rank))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return before - model[0].bias.tolist()[0]

    assert world(3, run) == [1.0, 1.0, 4.0]


def test_a_member_that_joined_follows_its_set(world):
    def run(rank, attendance):
        model, other = net(3, 2), net(4, 2)
        both = sgd(other, lr=0.0)
        within = sgd(model, lr=0.0, process_set=registered(0, 1)) if rank < 2 else None
        if rank:
            attendance.await_joined(1)
            for _ in range(2):
                if within is not None:
                    take_steps(model, within, 1, scale=2.0)
                take_steps(other, both, 1, scale=3.0)
        join.join()
        return None if rank == 0 else (grads(model)[-1], float(other[-1].bias.grad[0]))

    _, (mine, ours), (nothing, theirs) = world(3, run)
    assert mine.tolist() == [1.0, 1.0] and nothing is None
    assert ours == theirs == 2.0


def test_rank_0_is_not_queried_once_all_ranks_have_joined(monkeypatch):
    """Its process may have ended: a rank that asked it waited for half a minute, and the job ended."""
    asked: list[str] = []
    rt = create_autospec(WorkerRuntime, instance=True)
    rt.wanted.side_effect = lambda purpose, *_: asked.append(purpose)
    monkeypatch.setattr(plan_agreement, "of", lambda *_: plan_agreement.Plans())
    plans = join._SharedPlans(rt, None)
    assert not plans.turn(1.0, all_joined=True)
    assert plans.over and not asked
    assert not plans.turn(1.0, all_joined=False)
    assert asked
