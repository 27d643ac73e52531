"""Drawn jobs with loaders: each sample counts once per epoch in what is committed, whatever the world does meanwhile.

A failure names its seed: ``DataJob(drawn(seed), ...)`` is that job again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.data import sample_order
from elastic.data.batch_gradients import BatchGradients
from elastic.data.committed_batches import DataProgress
from elastic.data.loader import DataLoader
from elastic.data.sample_order import EpochOrder
from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.sample_sources import IndexedSource, Loaded
from elastic.runtime import lifecycle
from elastic.state.handlers.loader_state import LoaderStateHandler
from harness.data_job import DataJob, SetAttr, drawn, position_by_rank

IN_EACH_RUN = 60
NIGHTLY = 1000  # without real loader workers, and as many with them


def run(seed: int, monkeypatch: pytest.MonkeyPatch, *, most_workers: int = 0) -> DataJob:
    with monkeypatch.context() as patch:
        job = DataJob(drawn(seed, most_workers=most_workers), patch.setattr)
        try:
            job.run()
        except Exception as error:
            raise AssertionError(f"{job.schedule}: {error}") from error
    return job


@pytest.mark.nightly
def test_each_sample_counts_once_in_every_epoch(monkeypatch):
    jobs = [run(seed, monkeypatch) for seed in range(IN_EACH_RUN)]
    assert sum(job.changes for job in jobs) >= IN_EACH_RUN // 2
    assert len({job.schedule.kind for job in jobs}) > 10


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, NIGHTLY, 100))
def test_schedules_of_many_seeds_keep_the_invariants(monkeypatch, first):
    for seed in range(first, first + 100):
        run(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("seed", [3, 8])
def test_schedules_with_loader_workers_keep_the_invariants(monkeypatch, seed):
    assert run(seed, monkeypatch, most_workers=4).schedule.workers > 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("first", range(0, NIGHTLY, 100))
def test_schedules_of_many_seeds_with_loader_workers_keep_the_invariants(monkeypatch, first):
    for seed in range(first, first + 100):
        run(seed, monkeypatch, most_workers=4)


# ---- bugs, each of which must be caught ------------------------------------------------------------------------------


def prefetched_counts(setattr: SetAttr) -> None:
    def begin(
        self: IndexedSource,
        position: Position,
        dealing: SamplePartition,
        mine: list[int],
        real: Any = IndexedSource.begin,
    ) -> Iterator[Loaded]:
        for step, part, batch in real(self, position, dealing, mine):
            self.loaded = step.stop  # type: ignore[attr-defined]
            yield step, part, batch

    def state_dict(self: DataLoader, real: Any = DataLoader.state_dict) -> dict[str, Any]:
        state: dict[str, Any] = real(self)
        loaded = getattr(self._source._source, "loaded", 0)  # type: ignore[attr-defined]
        if state["consumed"]:
            state["consumed"] = max(loaded, state["consumed"])
        return state

    setattr(IndexedSource, "begin", begin)
    setattr(DataLoader, "state_dict", state_dict)


def last_round_repeated(setattr: SetAttr) -> None:
    def part(self: SamplePartition, step: range, number: int) -> range:
        size = -(-len(step) // self.parts)
        start = min(number * size, len(step) - size)
        return step[start : start + size]

    setattr(SamplePartition, "part", part)


def order_by_world(setattr: SetAttr) -> None:
    def shuffled(length: int, seed: int, epoch: int, real: Any = sample_order.shuffled) -> Any:
        found = lifecycle.position()
        assert found is not None
        return real(length, seed + found[0].size, epoch)

    setattr(sample_order, "shuffled", shuffled)


def stale_order(setattr: SetAttr) -> None:
    def of(self: EpochOrder, length: int, epoch: int, real: Any = EpochOrder.of) -> Any:
        return real(self, length, self._of[1] if self._of else epoch)

    setattr(EpochOrder, "of", of)


def handed_out_counts(setattr: SetAttr) -> None:
    def committed(self: DataProgress, *, before_steps: bool = False) -> Position:
        return self.reached

    setattr(DataProgress, "committed", committed)


def placeholders_count(setattr: SetAttr) -> None:
    setattr(BatchGradients, "silence", lambda self: None)


def half_a_step_survives(setattr: SetAttr) -> None:
    def deals_again(self: LoaderStateHandler, real: Any = LoaderStateHandler.deals_again) -> bool:
        real(self)
        return False

    setattr(LoaderStateHandler, "deals_again", deals_again)


def newcomers_begin_anew(setattr: SetAttr) -> None:
    def load(
        self: DataLoader, state: dict[str, Any], real: Any = DataLoader.load_state_dict
    ) -> None:
        real(self, state if self.position.consumed else {**state, "consumed": 0})

    setattr(DataLoader, "load_state_dict", load)


BUGS = [
    position_by_rank,
    prefetched_counts,
    last_round_repeated,
    order_by_world,
    stale_order,
    handed_out_counts,
    placeholders_count,
    half_a_step_survives,
    newcomers_begin_anew,
]


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(monkeypatch, bug):
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError, match=r"Schedule\("):
        for seed in range(IN_EACH_RUN):
            run(seed, monkeypatch)
