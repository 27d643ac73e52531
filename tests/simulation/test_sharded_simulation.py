"""Jobs with a sharded state in the simulator: no sealed commit is lost while its copies are on hosts that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic.chaos.simulator import simulated_shards
from elastic.chaos.simulator.simulated_shards import ShardedJob
from elastic.chaos.simulator.simulator import Simulation, Violation
from elastic.driver.reasons import ReasonKind
from elastic.sharding import copy_placement, resharding, shard_inventory
from harness import planted_shards

QUICK, ALL = 12, 400  # seeds
FOR_EACH_BUG = 60


def simulated(seed: int) -> tuple[ShardedJob, ReasonKind]:
    job = ShardedJob.drawn(seed)
    outcome = Simulation(seed, workers=6, steps=100, faults=10, sharded=job).run()
    return job, outcome.reason.kind


def test_jobs_resume_from_the_newest_sealed_commit_or_end_when_too_many_hosts_are_lost():
    found = [simulated(seed) for seed in range(QUICK)]
    assert sum(job.restored for job, _ in found) > QUICK
    ends = {kind for _, kind in found}
    assert {ReasonKind.ALL_RETURNED, ReasonKind.SHARDS_LOST} <= ends


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(QUICK, ALL, 97))
def test_many_sharded_simulations_keep_the_invariants(first: int):
    for seed in range(first, first + 97):
        simulated(seed)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (simulated_shards, "DoubleBuffer", planted_shards.WritesOverTheBase),
        (shard_inventory, "newest_whole", planted_shards.takes_stale_shards),
        (copy_placement, "place_copies", planted_shards.copies_on_the_owners_host),
        (simulated_shards, "sender", planted_shards.sends_from_a_rank_of_another_shard),
        (resharding, "plan_moves", planted_shards.brings_rows_to_one_replica),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, bug: Callable[..., Any]
):
    monkeypatch.setattr(where, name, bug)
    for seed in range(FOR_EACH_BUG):
        try:
            simulated(seed)
        except (Violation, KeyError):  # the latter: a row that the rank does not have
            return
    pytest.fail("no invariant was broken")


@pytest.mark.parametrize(
    ("where", "name", "bug", "invariant", "first"),
    [
        (
            simulated_shards,
            "DoubleBuffer",
            planted_shards.WritesOverTheBase,
            "SEALED IS MIRRORED",
            0,
        ),
        (
            simulated_shards,
            "DoubleBuffer",
            planted_shards.SealsBeforeItsMirror,
            "SEALED IS MIRRORED",
            0,
        ),
        # In most seeds, rows of two commits are mixed first, which a journal does not show.
        (shard_inventory, "newest_whole", planted_shards.takes_stale_shards, "SEALED IS KEPT", 180),
        (
            copy_placement,
            "place_copies",
            planted_shards.copies_on_the_owners_host,
            "EVERY SHARD HELD",
            0,
        ),
    ],
)
def test_planted_bug_is_found_by_the_journal_invariants_alone(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, bug: Any, invariant: str, first: int
):
    monkeypatch.setattr(where, name, bug)
    monkeypatch.setattr(ShardedJob, "met", lambda *_: None)  # what only the simulator knows
    for seed in range(first, first + FOR_EACH_BUG):
        try:
            simulated(seed)
        except Violation as broken:
            _, kind, *_ = str(broken).split(": ")
            if kind == invariant:
                return
        except (KeyError, TypeError):  # a row or a bank that the rank does not have
            continue
    pytest.fail("the invariant was not broken")
