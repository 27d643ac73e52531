"""Shards that two ranks compute, in worlds of ranks as threads: results without a trace, and who is named."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic.collectives import raise_together
from elastic.data import DataLoader
from elastic.errors import GradientsDiffer, Invalid, PeerLost
from elastic.exact import verification_rules
from elastic.exact.shards import Shards
from elastic.optimizer.distributed_optimizer import DistributedOptimizer
from elastic.optimizer.shard_sums.reducer import ShardReducer
from elastic.runtime import lifecycle
from elastic.state.handlers.part import ShardsStateHandler
from harness.small_worlds import drawn, set_drawn, shard_ranks_as_threads

STEPS, COUNT = 12, 8


@pytest.fixture
def ranks(monkeypatch):
    return shard_ranks_as_threads(monkeypatch)


class Network(torch.nn.Module):
    """With running statistics, and a parameter that only one shard uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 40), torch.nn.Linear(40, 2)
        self.norm = torch.nn.BatchNorm1d(40)
        self.rare = torch.nn.Parameter(torch.ones(7))
        set_drawn(self)

    def forward(self, inputs: torch.Tensor, shard: int) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(inputs)).relu())
        return found + self.rare.sum() if shard == 2 else found


class Run:
    """A rank's training. ``wrong``: called with step, shard and the number of the pass; whether to compute wrongly."""

    def __init__(self, share: float, wrong: Any = lambda *of: False, count: int = COUNT) -> None:
        self.model, self.shards = Network(), Shards(count, seed=3, verify=share, by_speed=False)
        self.shards.watch(self.model)
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9),
            self.model.named_parameters(),
            shards=self.shards,
        )
        self.wrong = wrong
        self.losses: list[float] = []
        self.passes, self.second = 0, 0

    def train(self, steps: int = STEPS) -> list[torch.Tensor]:
        for step in range(steps):
            found = []
            for shard in self.shards:
                self.passes += 1
                self.second += self.shards.verifying
                loss = self.model(drawn(4, 5, seed=100 * step + shard), shard).square().mean()
                if self.wrong(step, shard, self.passes):
                    loss = loss * 1.0001
                loss.backward()
                found.append(loss.detach())
            self.optimizer.step()
            self.losses.append(self.shards.mean(found))
        values = [*self.model.parameters(), *self.model.buffers()]
        values += [each["momentum_buffer"] for each in self.optimizer.state.values()]
        return [torch.tensor(self.losses, dtype=torch.float64), *values]


@pytest.mark.parametrize(
    "share", [1 / 16, *(pytest.param(s, marks=pytest.mark.nightly) for s in (1 / 4, 1.0))]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, pytest.param(11, marks=pytest.mark.nightly)])
def test_training_when_shards_are_verified_then_bits_equal_unverified_training(ranks, size, share):
    (wanted,) = ranks(1, lambda rank: Run(0.0).train())
    runs: list[Any] = [None] * size

    def train(rank: int) -> Any:
        runs[rank] = Run(share)
        return runs[rank].train()

    for found in ranks(size, train):
        assert all(map(torch.equal, wanted, found))
    second = sum(run.second for run in runs)
    checks = share * COUNT * STEPS if size > 1 else 0
    own = min(size, COUNT) if size > 1 else 0  # each rank computes one shard twice at the beginning
    assert abs(second - own - checks) <= min(size, COUNT)
    assert sum(run.passes for run in runs) == second + STEPS * COUNT


def named(ranks: Any, size: int, share: float, wrong: Any, kind: Any = PeerLost) -> Any:
    """Train until a rank is named. Return the reports of each rank, and the steps that each has taken."""

    def train(rank: int) -> Any:
        run = Run(share, lambda *of: wrong(rank, *of))
        with pytest.raises(kind) as error:
            run.train(200)
        world: Any = lifecycle.current()
        return world.miscomputed, run.shards.step, error.value

    return ranks(size, train)


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_training_when_a_rank_is_always_wrong_then_all_ranks_name_the_rank_before_the_step(
    ranks, culprit
):
    found = named(ranks, 4, 1 / 8, lambda rank, step, *_: rank == culprit and step >= 5)
    held = [(0, 1), (2, 3), (4, 5), (6, 7)]
    bound = verification_rules.steps_between(held, 1 / 8)
    for reports, steps, _ in found:
        (report,) = reports
        assert report.rank == culprit and culprit not in report.witnesses
        assert len(report.witnesses) == 3 and report.digest != report.right
        assert 5 <= report.step < 5 + bound + 1 and steps == report.step
        assert report.agreed < 5


def test_training_when_a_rank_is_named_then_all_ranks_know_before_any_leaves(ranks, monkeypatch):
    """A rank that leaves a group breaks collectives of the others."""
    waited = []

    def wait(group: Any, real: Any = raise_together.wait_for_all) -> None:
        world: Any = lifecycle.current()
        waited.append((world.place.rank, len(world.miscomputed)))
        real(group)

    monkeypatch.setattr(raise_together, "wait_for_all", wait)
    named(ranks, 4, 1.0, lambda rank, step, *_: rank == 1 and step > 2)
    assert sorted(waited) == [(rank, 1) for rank in range(4)]


def test_training_when_a_rank_was_wrong_once_then_this_rank_is_named(ranks):
    """A checked shard is computed by one rank, wrongly, and no more than once."""
    found = named(ranks, 4, 1.0, lambda rank, step, shard, count: rank == 2 and count == 30)
    assert {report.rank for reports, _, _ in found for report in reports} == {2}


def test_training_when_two_of_five_are_wrong_then_both_are_named(ranks):
    found = named(
        ranks,
        5,
        1.0,
        lambda rank, step, shard, count: (
            step > 1 and rank in (1, 3) and (count * 7 + rank) % 11 != 0
        ),
    )
    for reports, _, _ in found:
        assert {report.rank for report in reports} == {1, 3}


def test_training_when_two_ranks_differ_and_one_was_wrong_once_then_this_rank_is_named(ranks):
    found = named(ranks, 2, 1.0, lambda rank, step, shard, count: rank == 1 and count == 20)
    assert {report.rank for reports, _, _ in found for report in reports} == {1}


def test_training_when_two_ranks_always_differ_then_the_error_has_both_digests(ranks):
    found = named(
        ranks, 2, 1.0, lambda rank, step, *_: rank == 1 and step > 2, kind=GradientsDiffer
    )
    for reports, _, error in found:
        assert not reports and error.step == 3
        assert {rank for rank, _ in error.computed} == {0, 1} and len(error.computed) == 4
    assert len({str(error) for _, _, error in found}) == 1


@pytest.mark.parametrize(
    ("size", "share", "warnings"), [(1, 0.5, 1), (2, 0.5, 1), (4, 0.5, 0), (2, 0, 0)]
)
def test_log_when_too_few_workers_can_vote_then_has_one_warning(
    ranks, caplog, size, share, warnings
):
    ranks(size, lambda rank: Run(share).train(2))
    found = [each for each in caplog.records if each.name == "elastic.exact"]
    assert [each.levelname for each in found] == ["WARNING"] * warnings


def test_training_when_the_model_is_not_deterministic_then_no_step_is_taken(ranks):
    """A pass that depends on the passes before."""
    found = named(ranks, 3, 1 / 64, lambda rank, step, shard, count: count > 1, kind=Invalid)
    assert all(steps == 0 and not reports for reports, steps, _ in found)


def test_training_when_one_rank_contradicts_its_own_result_at_the_beginning_then_is_named(ranks):
    found = named(ranks, 3, 1 / 64, lambda rank, step, shard, count: rank == 1 and count == 1)
    for reports, steps, _ in found:
        assert [report.rank for report in reports] == [1] and steps == 0


def test_training_when_arithmetic_differs_then_no_step_is_taken(ranks, monkeypatch):
    monkeypatch.setattr(
        Shards, "arithmetic", property(lambda self: [f"threads {lifecycle.current().place.rank}"])
    )
    found = named(ranks, 3, 1 / 64, lambda *_: False, kind=Invalid)
    assert all(steps == 0 for _, steps, _ in found)


def test_training_when_a_rank_is_lost_in_a_second_pass_then_its_peers_raise_peer_lost(ranks):
    def train(rank: int) -> Any:
        run = Run(1.0)

        def wrong(step: int, shard: int, count: int) -> bool:
            if rank == 1 and step == 2 and run.shards.verifying:
                raise MemoryError
            return False

        run.wrong = wrong
        with pytest.raises((PeerLost, MemoryError)):
            run.train()
        world: Any = lifecycle.current()
        world.gradients.abort()
        run.shards.abandon()
        return run.shards.step, run.shards.verifying

    assert ranks(3, train) == [(2, False)] * 3


# ---- evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1 / 8, 1.0])
def test_state_when_a_rank_is_blamed_then_its_state_and_that_of_a_witness_are_saved(
    ranks, tmp_path, share
):
    def train(rank: int) -> Any:
        world: Any = lifecycle.current()
        world.env = replace(world.env, keep_faulty=str(tmp_path / "faulty"))
        run = Run(share, lambda step, *_: rank == 2 and step >= 5)
        with pytest.raises(PeerLost):
            run.train(200)
        return world.miscomputed

    ((report,), *_) = ranks(4, train)
    states = {
        state["rank"]: state
        for path in (tmp_path / "faulty").iterdir()
        for state in [torch.load(path, weights_only=True)]
    }
    assert states.keys() == {2, report.witnesses[0]}
    wrong, right = states.pop(2), states.popitem()[1]
    assert (wrong["right"], right["right"]) == (False, True)
    for each in wrong, right:
        assert each["evidence"]["step"] == report.step and each["evidence"]["rank"] == 2
        assert each["seed"] == 3 and each["host"] and each["arithmetic"]
    ((wrong_buffers, wrong_model), (right_buffers, right_model)) = wrong["parts"], right["parts"]
    assert wrong_model["parameters"].keys() == right_model["parameters"].keys()
    for kind, one, other in (
        ("parameters", wrong_model, right_model),
        ("buffers", wrong_buffers, right_buffers),
    ):
        assert one[kind] and all(
            torch.equal(value, other[kind][name]) for name, value in one[kind].items()
        ), "both computed from the same values"
    digests = [
        next(found for name in ("second_digests", "digests") if (found := each[name]))
        for each in (wrong_model, right_model)
    ]
    assert digests[0].keys() == digests[1].keys() and digests[0] != digests[1]


def test_state_when_the_folder_cannot_be_written_then_the_rank_is_still_named(
    ranks, tmp_path, caplog
):
    (tmp_path / "file").touch()

    def train(rank: int) -> Any:
        world: Any = lifecycle.current()
        world.env = replace(world.env, keep_faulty=str(tmp_path / "file"))
        run = Run(1.0, lambda step, *_: rank == 2 and step >= 5)
        with pytest.raises(PeerLost):
            run.train(200)
        return world.miscomputed

    assert all([each.rank for each in reports] == [2] for reports in ranks(4, train))
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def spoils(run: Run, shard: int, value: float) -> None:
    """Let one element of a gradient of a shard be ``value`` in the backward pass in progress."""
    bias = run.model.last.bias

    def put(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        gradient = gradient.clone()
        gradient[1] = value
        return gradient

    handle = bias.register_hook(put)


UNCHECKED = next(
    step
    for step in range(3, 50)
    if not verification_rules.checks([(0, 1), (2, 3), (4, 5), (6, 7)], 1 / 64, 3, 1, step)
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("always", [False, True])
def test_step_without_a_check_when_a_gradient_is_not_finite_then_its_rank_is_named(
    ranks, value, always
):
    def train(rank: int) -> Any:
        run = Run(1 / 64)

        def wrong(step: int, shard: int, count: int) -> bool:
            if rank == 2 and step == UNCHECKED and (always or not run.shards.verifying):
                spoils(run, shard, value)
            return False

        run.wrong = wrong
        with pytest.raises(PeerLost):
            run.train(200)
        world: Any = lifecycle.current()
        return world.miscomputed, run.shards.step, run.second

    for reports, steps, _ in ranks(4, train):
        (report,) = reports
        assert report.rank == 2 and report.step == steps == UNCHECKED
        wanted = "not finite" if not math.isfinite(value) else "too large"
        assert report.digest == wanted != report.right and len(report.witnesses) == 3


@pytest.mark.parametrize("value", [math.inf, 1e7])
@pytest.mark.parametrize("size", [2, 4])
def test_step_when_all_ranks_find_a_gradient_not_finite_then_is_taken(ranks, size, value):
    """As with a scale that is too large: the shard is computed twice, and training goes on as without verify."""

    def train(rank: int, share: float = 1 / 64) -> Any:
        run = Run(share)

        def wrong(step: int, shard: int, count: int) -> bool:
            if step in (UNCHECKED, UNCHECKED + 1) and shard == 5:
                spoils(run, shard, value)
            return False

        run.wrong = wrong
        found = run.train(UNCHECKED + 4)
        world: Any = lifecycle.current()
        return found, run.second, getattr(world, "miscomputed", [])

    ((wanted, _, _),) = ranks(1, lambda rank: train(rank, 0.0))
    found = ranks(size, train)
    assert not any(reports for _, _, reports in found)
    for values, _, _ in found:
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(wanted, values, strict=True)
        )
    second = sum(second for _, second, _ in found)
    assert second >= size + 2, "one pass for each step with such a gradient"


# ---- a bug that the comparison must show -----------------------------------------------------------------------------


def test_training_when_a_second_pass_leaves_its_gradients_then_bits_differ(ranks, monkeypatch):
    (wanted,) = ranks(1, lambda rank: Run(0.0).train())
    real = ShardReducer.second_pass_begins

    def leaves(self: ShardReducer, shard: int) -> None:
        real(self, shard)
        for (parameter, _), kept in zip(self._trained(), self._kept, strict=True):
            parameter.grad = kept

    monkeypatch.setattr(ShardReducer, "second_pass_begins", leaves)
    with pytest.raises((Invalid, AssertionError, PeerLost)):
        for found in ranks(3, lambda rank: Run(1 / 4).train()):
            assert all(map(torch.equal, wanted, found))


# ---- loaders ---------------------------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 74

    def __getitem__(self, index: int) -> torch.Tensor:
        return drawn(5, seed=index)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_training_with_a_loader_when_verified_then_bits_equal_unverified_training(ranks, size):
    """With an uneven end of each epoch."""

    def train(share: float) -> Any:
        run = Run(share, count=4)
        loader = DataLoader(Samples(), shuffle=True, global_batch_size=16, shards=run.shards)
        weights = []
        for _ in range(2):
            for step in loader:
                losses = []
                for inputs in run.shards.over(step):
                    loss = run.model(inputs, loader.shard).square().mean() * loader.weight
                    loss.backward()
                    losses.append(loss.detach())
                run.optimizer.step()
                weights.append(run.shards.mean(losses))
            assert loader.position.consumed == 0
        return [torch.tensor(weights), *run.model.parameters(), *run.model.buffers()]

    (wanted,) = ranks(1, lambda rank: train(0.0))
    for found in ranks(size, lambda rank: train(1.0)):
        assert all(map(torch.equal, wanted, found))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "1/64", float("nan")])
def test_shards_when_the_share_is_out_of_range_then_are_refused(share):
    with pytest.raises(Invalid):
        Shards(8, verify=share)


def test_shards_when_not_exact_then_verify_is_refused():
    with pytest.raises(Invalid):
        Shards(8, exact=False, verify=0.5)


def test_layout_when_the_share_differs_then_workers_are_refused_and_checkpoints_are_not():
    one, other = (ShardsStateHandler(Shards(8, verify=share), "shards") for share in (0.5, 0.25))
    lines, others = "\n".join(one.layout()), "\n".join(other.layout())
    assert lines != others and one.comparable(lines) == other.comparable(others)
    none = ShardsStateHandler(Shards(8), "shards")
    assert none.comparable("\n".join(none.layout())) == one.comparable(lines)


def test_over_when_batches_are_a_list_then_verify_is_refused(ranks):
    def train(rank: int) -> None:
        run = Run(0.5)
        with pytest.raises(Invalid):
            next(run.shards.over([drawn(4, 5, seed=shard) for shard in run.shards.held]))

    ranks(1, train)
