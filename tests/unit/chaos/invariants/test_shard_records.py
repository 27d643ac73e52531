"""Invariants of sharded commits on journals of a real job and of simulated ones, each also tampered with."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable

import msgspec
import pytest

from elastic.chaos.invariants import check
from elastic.chaos.invariants.invariants import BrokenInvariant, Invariants, check_journal
from elastic.chaos.simulator.simulated_shards import ShardedJob
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.events import (
    Event,
    PublishWorld,
    WorkerRaised,
    WorkerReady,
    WorkerResumed,
    WorkerSpent,
)
from elastic.driver.journal.entries import Entry
from elastic.driver.journal.journal import read
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, HeldCommitShards, Times, Worker
from harness.kept_journals import SHARDED, lines_of, unpacked, written

Change = Callable[[Event], Event]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, list[Entry]]:
    return read(unpacked(SHARDED, tmp_path_factory.mktemp("kept")))


def checked(settings: Settings, entries: Iterable[Entry]) -> Invariants:
    invariants = Invariants(settings)
    for entry in entries:
        invariants.saw(entry.at, entry.event, entry.actions)
    return invariants


def kind_of(job: tuple[Settings, list[Entry]], change: Change) -> str:
    """Return the kind of the invariant that is broken once each event is changed."""
    settings, entries = job
    changed = [Entry(each.at, change(each.event), each.actions) for each in entries]
    assert changed != entries, "nothing was tampered with"
    with pytest.raises(BrokenInvariant) as caught:
        checked(settings, changed)
    return str(caught.value).partition(":")[0]


def ready_after(
    generation: int, change: Callable[[HeldCommitShards], HeldCommitShards | None]
) -> Change:
    """Change what workers that come from this generation hold of each commit; None: remove it."""

    def changed(event: Event) -> Event:
        if (
            not isinstance(event, WorkerReady)
            or event.shards is None
            or event.generation != generation
        ):
            return event
        held = tuple(found for each in event.shards.held if (found := change(each)) is not None)
        return msgspec.structs.replace(
            event, shards=msgspec.structs.replace(event.shards, held=held)
        )

    return changed


def resumed_in(generation: int, *, slot: int | None = None, **fields: object) -> Change:
    """Change what workers report of their part in this generation."""

    def changed(event: Event) -> Event:
        if (
            not isinstance(event, WorkerResumed)
            or event.generation != generation
            or event.shards is None
        ):
            return event
        if slot is not None and event.worker.slot != slot:
            return event
        return msgspec.structs.replace(
            event, shards=msgspec.structs.replace(event.shards, **fields)
        )

    return changed


def sealed_before(entries: Iterable[Entry], generation: int) -> Commit:
    """Return the newest commit that a worker knew to be sealed when it left this generation."""
    return max(
        each.event.shards.sealed
        for each in entries
        if isinstance(each.event, WorkerReady)
        and each.event.generation == generation
        and each.event.shards is not None
        and each.event.shards.sealed is not None
    )


def test_recorded_job_restores_the_newest_sealed_commit_in_each_world(tmp_path):
    assert check_journal(unpacked(SHARDED, tmp_path)).shards_restored >= 4


def test_recovery_to_an_older_sealed_commit_breaks_sealed_is_kept(recorded):
    sealed = sealed_before(recorded[1], 2)
    older = Commit(sealed.generation, sealed.number - 1)
    assert kind_of(recorded, resumed_in(3, restored=older)) == "SEALED IS KEPT"


def test_check_command_fails_only_for_a_tampered_journal(tmp_path):
    journal = unpacked(SHARDED, tmp_path)
    header, lines = lines_of(journal)
    sealed = sealed_before([line for line in lines if isinstance(line, Entry)], 2)
    older = resumed_in(3, restored=Commit(sealed.generation, sealed.number - 1))
    tampered = [
        Entry(line.at, older(line.event), line.actions) if isinstance(line, Entry) else line
        for line in lines
    ]
    other = written(tmp_path / "tampered.jsonl", header, tampered)
    codes = [check.main(Namespace(journal=[each], samples=None)) for each in (journal, other)]
    assert codes == [0, 1]


def test_return_to_a_checkpoint_while_every_shard_is_held_breaks_sealed_is_kept(recorded):
    assert kind_of(recorded, resumed_in(3, restored=None)) == "SEALED IS KEPT"


def test_end_for_lost_shards_that_are_held_breaks_sealed_is_kept(recorded):
    def lost(event: Event) -> Event:
        if isinstance(event, WorkerResumed) and event.generation == 3:
            return WorkerRaised(event.worker, 3, None, "", "", final=True, shards_lost=True)
        return event

    assert kind_of(recorded, lost) == "SEALED IS KEPT"


def test_shard_held_by_no_worker_in_a_restored_world_breaks_every_shard_held(recorded):
    without = ready_after(
        2, lambda each: msgspec.structs.replace(each, copies=tuple({*each.copies} - {0}))
    )
    assert kind_of(recorded, without) == "EVERY SHARD HELD"


def test_seal_before_its_mirror_breaks_sealed_is_mirrored(recorded):
    sealed = sealed_before(recorded[1], 2)
    not_yet = ready_after(
        2,
        lambda each: (
            msgspec.structs.replace(each, mirrored=False) if each.commit == sealed else each
        ),
    )
    assert kind_of(recorded, not_yet) == "SEALED IS MIRRORED"


def test_seal_of_a_commit_that_a_member_has_not_copied_breaks_sealed_is_mirrored(recorded):
    sealed = sealed_before(recorded[1], 2)
    gone = ready_after(2, lambda each: None if each.commit == sealed else each)
    assert kind_of(recorded, gone) == "SEALED IS MIRRORED"


def test_seal_reported_only_by_a_lost_worker_is_checked(recorded):
    settings, entries = recorded
    sealed = sealed_before(entries, 2)
    newer = Commit(sealed.generation, sealed.number + 1)
    spent = WorkerSpent(Worker("localhost", 0), 2, Times(), "training", sealed=newer)
    after = next(n for n, each in enumerate(entries) if published(each) == 3)
    told = [*entries[:after], Entry(entries[after].at, spent), *entries[after:]]
    with pytest.raises(BrokenInvariant) as caught:
        checked(settings, told)
    assert str(caught.value).partition(":")[0] == "SEALED IS MIRRORED"


def published(entry: Entry) -> int | None:
    return next((a.generation for a in entry.actions if isinstance(a, PublishWorld)), None)


def test_members_that_restore_different_commits_break_one_commit_restored(recorded):
    sealed = sealed_before(recorded[1], 2)
    newer = Commit(sealed.generation, sealed.number + 1)
    assert kind_of(recorded, resumed_in(3, slot=3, restored=newer)) == "ONE COMMIT RESTORED"


def test_shard_that_no_member_trains_breaks_every_shard_held(recorded):
    assert kind_of(recorded, resumed_in(3, shard=0)) == "EVERY SHARD HELD"


def simulated(seed: int) -> tuple[Settings, list[Entry]]:
    simulation = Simulation(seed, workers=6, steps=100, faults=10, sharded=ShardedJob.drawn(seed))
    simulation.run()
    return simulation.settings, simulation.driver.entries


def test_copy_missing_on_another_host_breaks_every_shard_held():
    assert kind_of(simulated(0), resumed_in(2, keeps=())) == "EVERY SHARD HELD"


def test_loss_of_more_hosts_than_copies_is_accepted_and_of_fewer_is_not():
    jobs = (job for job in map(simulated, range(20)) if any(map(ends_for_lost_shards, job[1])))
    kinds = set()
    for settings, entries in jobs:
        assert checked(settings, entries).job.end is not None
        resumed = [n for n, each in enumerate(entries) if isinstance(each.event, WorkerResumed)]
        for entry in entries[max(resumed, default=0) :]:
            if isinstance(entry.event, WorkerReady) and entry.event.shards is not None:
                more = msgspec.structs.replace(entry.event.shards, copies=5)
                entry.event = msgspec.structs.replace(entry.event, shards=more)
        try:
            checked(settings, entries)
        except BrokenInvariant as error:
            kinds.add(str(error).partition(":")[0])
    assert kinds == {"SEALED IS KEPT"}


def ends_for_lost_shards(entry: Entry) -> bool:
    return isinstance(entry.event, WorkerRaised) and entry.event.shards_lost
