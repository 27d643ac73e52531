"""Resuming from a journal in any storage: see `journal_contract`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from elastic.chaos.simulator.simulated_faults import FaultConditions
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.events import Action, DriverRestarted, EndJob, Event, StopRequested, TimePassed
from elastic.driver.journal.entries import Entry, Writer, header_of
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.journal.journal import Journal, SnapshotPolicy, read, replay
from elastic.driver.journal.local_copy import JournalCopy
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from harness.golden import raises
from harness.journal_contract import PLACES, InEtcd, InRay

FIRST = Writer(1, "10.0.0.1:4000", "2026-01-01T00:00:00+0000", 100, 0.0, 0.0, 1000.0, "a")
SECOND = Writer(2, "10.0.0.2:4000", "2026-01-01T01:00:00+0000", 200, 50.0, 0.0, 4600.0, "b")
COMMAND = ["python", "train.py", "--epochs", "3"]


@pytest.fixture(scope="module")
def job() -> tuple[Settings, list[Entry]]:
    """Return a few hundred entries of an eventful job whose driver also crashed."""
    sim = Simulation(2, workers=6, steps=80, faults=10, mild=True, silence_s=0.0)
    sim.run()
    end = next(n for n, e in enumerate(sim.driver.entries) if any(map(is_end, e.actions)))
    return sim.settings, sim.driver.entries[:end]


def is_end(action: object) -> bool:
    return isinstance(action, EndJob)


@pytest.fixture(
    params=[
        pytest.param(place, id=place.__name__, marks=pytest.mark.slow if place is InRay else [])
        for place in PLACES
    ]
)
def place(request, tmp_path):
    return request.param(tmp_path)


class Drive:
    """A driver that writes a journal in one of the storages."""

    journal: Journal

    def __init__(self, place, settings: Settings, *, every: int = 10**6) -> None:
        self.place = place
        self.settings = settings
        self.every = every
        self.membership = Membership(settings)

    async def begin(self, job: str = "0a1b") -> RecoveredJob | None:
        """Begin a new job. Return the job that existed."""
        archive = self.place.archive()
        past: RecoveredJob | None = await archive.past()
        header = header_of(
            self.settings, job=job, command=COMMAND, folder="/home/me", outlives=True, writer=FIRST
        )
        self.journal = await archive.begin(header, self._policy())
        return past

    async def go_on(self, writer: Writer = SECOND) -> RecoveredJob:
        """Resume the existing job."""
        archive = self.place.archive()
        past: RecoveredJob | None = await archive.past()
        assert past is not None
        self.membership = past.membership
        self.journal = await archive.go_on(past, writer, self._policy())
        return past

    def _policy(self) -> SnapshotPolicy:
        return SnapshotPolicy(
            take=lambda: take_snapshot(self.membership), snapshot_every=self.every
        )

    def record(self, entry: Entry) -> None:
        actions = self.membership.handle(entry.event, entry.at, more=entry.more)
        self.journal.record(entry.at, entry.event, actions, more=entry.more)

    async def tell(self, entries: Sequence[Entry]) -> None:
        """Record the entries in batches, as the event loop does."""
        for number, entry in enumerate(entries):
            self.record(entry)
            if number % 3 == 2:
                await self.journal.settle()
            if number % 12 == 11:
                await self.journal.rest()
        await self.journal.settle()

    def kill(self) -> bytes:
        """Kill the driver and return its state."""
        self.place.kill(self.journal)
        return take_snapshot(self.membership)


def conversation(test):
    """Run the test with the entries of a job."""

    async def run(place, job):
        await test(place, *job)

    return run


@conversation
async def test_empty_storage_has_no_job(place, settings, entries):
    assert await Drive(place, settings).begin() is None


@conversation
async def test_successor_restores_the_complete_settled_state(place, settings, entries):
    first = Drive(place, settings)
    await first.begin()
    await first.tell(entries[:100])
    known = first.kill()
    second = Drive(place, settings)
    past = await second.go_on()
    assert take_snapshot(second.membership) == known
    assert (past.job, past.command, past.folder) == ("0a1b", COMMAND, "/home/me")
    assert (past.settings, past.term, past.address) == (settings, 1, "10.0.0.1:4000")
    assert (past.last_at, past.replayed, past.ended) == (entries[99].at, 100, None)
    assert past.header.outlives


async def test_successor_resumes_between_queued_events(place, tmp_path):
    """The local copy of the journal also contains which events were queued."""
    weather = FaultConditions.drawn(2, mild=True)
    weather.busy_s = 0.05
    sim = Simulation(2, workers=6, steps=60, faults=14, mild=True, weather=weather)
    sim.run()
    entries = sim.driver.entries
    last = max(n for n, each in enumerate(entries[:100]) if each.more)
    first = Drive(place, sim.settings)
    await first.begin()
    copy = FileJournal.begin(tmp_path / "copy", sim.settings)
    stored, first.journal = first.journal, JournalCopy(first.journal, copy)
    await first.tell(entries[: last + 1])
    copy.close()
    first.journal = stored
    known = first.kill()
    second = Drive(place, sim.settings)
    past = await second.go_on()
    assert (take_snapshot(second.membership), past.replayed) == (known, last + 1)
    assert read(tmp_path / "copy")[1] == entries[: last + 1]
    assert len(replay(tmp_path / "copy")) == last + 1


@conversation
async def test_job_that_has_only_begun_is_resumed(place, settings, entries):
    first = Drive(place, settings)
    await first.begin()
    known = first.kill()
    past = await Drive(place, settings).go_on()
    assert (take_snapshot(past.membership), past.replayed, past.last_at) == (known, 0, 0.0)


@conversation
async def test_several_drivers_resume_in_turn(place, settings, entries):
    drive = Drive(place, settings)
    await drive.begin()
    for term in range(2, 6):
        start = (term - 2) * 40
        await drive.tell(entries[start : start + 40])
        known = drive.kill()
        drive = Drive(place, settings)
        past = await drive.go_on(Writer(term, f"host{term}:1", at=entries[start + 39].at))
        assert past.term == term - 1 and take_snapshot(past.membership) == known
        await drive.tell([Entry(past.last_at, DriverRestarted())])
    drive.kill()
    past = await Drive(place, settings).go_on(Writer(6))
    assert (past.term, past.address) == (5, "host5:1")


@conversation
async def test_only_entries_after_the_last_snapshot_are_read(place, settings, entries):
    first = Drive(place, settings, every=20)
    await first.begin()
    await first.tell(entries)
    known = first.kill()
    second = Drive(place, settings, every=20)
    past = await second.go_on()
    assert past.replayed < 100 < len(entries) and take_snapshot(past.membership) == known
    assert (past.job, past.command, past.last_at) == ("0a1b", COMMAND, entries[-1].at)
    await second.tell([Entry(past.last_at + n, TimePassed()) for n in range(300)])
    known = second.kill()
    past = await Drive(place, settings).go_on(Writer(3))
    assert past.replayed < 300 and past.term == 2, "who took over is known behind a snapshot"
    assert take_snapshot(past.membership) == known


@conversation
async def test_incomplete_entry_is_ignored(place, settings, entries):
    first = Drive(place, settings)
    await first.begin()
    await first.tell(entries[:50])
    known = take_snapshot(first.membership)
    await place.tear(first.journal)
    second = Drive(place, settings)
    past = await second.go_on()
    assert (past.replayed, take_snapshot(past.membership)) == (50, known)
    await second.tell(entries[50:60])
    known = second.kill()
    past = await Drive(place, settings).go_on(Writer(3))
    assert (past.replayed, take_snapshot(past.membership)) == (60, known)


@conversation
async def test_two_drivers_cannot_write_at_once(place, settings, entries):
    first = Drive(place, settings)
    await first.begin()
    await first.tell(entries[:10])
    await place.refuses_a_second(first.journal)
    second = Drive(place, settings)
    first.kill()
    await second.go_on()
    await place.refuses_a_second(second.journal)


@conversation
async def test_ended_job_is_distinguished_from_a_running_one(place, settings, entries):
    first = Drive(place, settings, every=1)
    await first.begin()
    await first.tell([*entries[:30], Entry(entries[29].at, StopRequested("Ctrl-C"))])
    await first.tell([Entry(entries[29].at + n, TimePassed()) for n in range(30)])
    first.kill()
    second = Drive(place, settings)
    past = await second.begin("next")
    assert past is not None and past.ended == EndJob(1, as_sentence("Ctrl-C"))
    second.kill()
    past = await Drive(place, settings).go_on()
    assert (past.job, past.ended, past.replayed) == ("next", None, 0), (
        "nothing of the first is left"
    )


@conversation
async def test_job_ended_by_a_bug_is_resumed_as_ended(place, settings, entries):
    first = Drive(place, settings, every=3)
    await first.begin()
    await first.tell(entries[:30])

    at, right = entries[29].at + 1.0, Membership.handle

    def buggy(self: Membership, event: Event, now: float, *, more: bool = False) -> list[Action]:
        assert now != at, "never"
        return right(self, event, now)

    first.journal.record(at, TimePassed(), error="AssertionError: never")
    await first.journal.settle()
    await first.journal.rest()
    first.kill()
    Membership.handle = buggy  # type: ignore[method-assign]
    try:
        past = await place.archive().past()
    finally:
        Membership.handle = right  # type: ignore[method-assign]
    assert past is not None and past.ended == EndJob(
        1, as_sentence("a bug in the driver: AssertionError: never")
    )


@conversation
async def test_history_contains_no_value_of_the_environment(place, settings, entries):
    first = Drive(place, Settings(**{**vars(settings), "env": {"TOKEN": "hunter2"}}), every=10)
    await first.begin()
    await first.tell(entries[:50])
    assert "HostsChanged" in first.journal.story() and "StartWorker" in first.journal.story()
    assert len(first.journal.story(last=1).splitlines()) < 10
    assert b"hunter2" not in place.contents() and b"TOKEN" in place.contents()


# ---- etcd only ------------------------------------------------------------------------------------------------------


async def test_snapshots_keep_the_journal_in_etcd_small(tmp_path, job):
    """One key per record, and only the records between two snapshots; large ones are split."""
    place = InEtcd(tmp_path)
    drive = Drive(place, job[0], every=30)
    await drive.begin()
    await drive.tell(job[1])
    assert place.etcd.transactions > 80 and len(place.etcd.kept) < 60
    drive.kill()
    drive = Drive(place, job[0])
    assert await drive.begin("next") is not None
    assert len(place.etcd.kept) == 1


@pytest.mark.parametrize("lives_for", range(5))
async def test_snapshot_is_atomic(tmp_path, job, lives_for, monkeypatch):
    """The driver is killed after each of its transactions."""
    monkeypatch.setattr("elastic.driver.journal.record_pieces.PIECE", 2000)
    place = InEtcd(tmp_path)
    drive = Drive(place, job[0], every=100)
    await drive.begin()
    for entry in job[1][:150]:
        drive.record(entry)
        await drive.journal.settle()
    assert place.etcd.leader is not None
    place.etcd.leader.lives_for = lives_for
    with pytest.raises(asyncio.CancelledError):
        await drive.journal.rest()
    past = await Drive(place, job[0]).go_on()
    assert past.replayed == 150 and take_snapshot(past.membership) == take_snapshot(
        drive.membership
    )


async def test_lost_request_is_repeated(tmp_path, job):
    """Regardless of whether it was executed: the answer was lost."""
    place = InEtcd(tmp_path)
    drive = Drive(place, job[0])
    await drive.begin()
    await drive.tell(job[1][:10])
    leader = place.etcd.leader
    assert leader is not None
    for entry in job[1][10:20]:
        drive.record(entry)
        leader.lives_for = 0
        with pytest.raises(asyncio.CancelledError):
            await drive.journal.settle()
    leader.lives_for = None
    await drive.journal.settle()
    past = await Drive(place, job[0]).go_on()
    assert past.replayed == 20 and take_snapshot(past.membership) == take_snapshot(drive.membership)


async def test_missing_record_is_detected(tmp_path, job):
    place = InEtcd(tmp_path)
    drive = Drive(place, job[0])
    await drive.begin()
    await drive.tell(job[1][:30])
    del place.etcd.kept["/hvd-elastic/night/journal/000000000004"]
    with raises(ValueError):
        await place.archive().past()


async def test_version_that_decides_differently_is_detected(tmp_path, job, monkeypatch):
    """Even though etcd does not keep the actions."""
    place = InEtcd(tmp_path)
    drive = Drive(place, job[0])
    await drive.begin()
    await drive.tell(job[1][:30])
    assert b"StartWorker" not in place.contents()
    monkeypatch.setattr(
        "elastic.driver.membership.scheduling.rank_order.places",
        lambda order, first=0: [None] * (len(order) - first),
    )
    with raises(ValueError):
        await place.archive().past()
