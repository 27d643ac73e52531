"""Journal files that continue in new segments: adoption, readers, crashes during the switch, and full disks."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.chaos.harness.journal_tail import JournalTail
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.commandline.offline.explain_cli import as_text
from elastic.driver.events import DriverRestarted, HostsChanged
from elastic.driver.journal import file_journal as journal_file
from elastic.driver.journal.entries import Header, Writer, decoded_header, encoded, header_of
from elastic.driver.journal.file_journal import KEPT, FileArchive, FileJournal, check_own
from elastic.driver.journal.journal import Journal, SnapshotPolicy, read, recording, replay
from elastic.driver.journal.local_copy import JournalCopy
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.rotation import OVERDUE, SegmentLimits
from elastic.driver.journal.segment_files import next_path, older_segments, segment_path
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.monitoring.explain.findings import FindingKind, findings
from elastic.driver.monitoring.explain.journal_file import JournalReading, read_journal
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from harness.golden import raises, recorded

SMALL = SegmentLimits(least=25_000, snapshots=0, kept=10**9)
FIRST = Writer(1, "h1:1", "2026-01-01T00:00:00+0000", 100, 0.0, 0.0, 1000.0, "a")


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: the machine does not crash in these tests."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def settings(**changes) -> Settings:
    return Settings(np=2, workers_min=1, workers_max=2, elastic=True, **changes)


def hosts(number: float) -> HostsChanged:
    return HostsChanged({f"host-{number % 3:.0f}-{'x' * 400}": 1})


class Driver:
    """A driver that adopts the job in a file, or begins one, and records events."""

    def __init__(
        self, path: Path, limits: SegmentLimits = SMALL, *, resumable: bool = True
    ) -> None:
        self.path = path
        self.logged: list[str] = []
        self.shots = 0
        self.archive = FileArchive(path, limits)
        self.past: RecoveredJob | None = None
        self.membership = Membership(settings())
        self.resumable = resumable
        self.now = 0.0
        self.journal: FileJournal

    def _take(self) -> bytes:
        self.shots += 1
        return take_snapshot(self.membership)

    async def start(self, job: str = "a1") -> Driver:
        policy = SnapshotPolicy(
            take=self._take, resumable=self.resumable, snapshot_every=5, failed=self.logged.append
        )
        header = header_of(settings(), job=job, outlives=self.resumable, writer=FIRST)
        self.past = await self.archive.past() if self.resumable else None
        if self.past is None:
            self.journal = await self.archive.begin(header, policy)
        else:
            self.membership, self.now = self.past.membership, self.past.last_at
            writer = replaced(FIRST, term=self.past.term + 1, pid=300)
            self.journal = await self.archive.go_on(self.past, writer, policy)
            self.record(DriverRestarted())
        return self

    def record(self, event) -> None:
        self.now += 1.0
        self.journal.record(self.now, event, self.membership.handle(event, self.now))

    async def turns(self, count: int) -> None:
        """Let a host with another name join and leave at each turn, as the driver's loop would write it."""
        for _ in range(count):
            self.record(hosts(self.now))
            await self.journal.settle()
            await self.journal.rest()

    def kill(self) -> bytes:
        self.archive.close()
        return take_snapshot(self.membership)


class Heard:
    """The entries that a follower of the journal has read."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def update(self, entry: dict[str, Any]) -> None:
        self.heard.append(entry)


def replaced(writer: Writer, **changes) -> Writer:
    return msgspec.structs.replace(writer, **changes)


def header_in(path: Path) -> Header:
    return decoded_header(path.read_bytes().splitlines()[0])


def explained(reading: JournalReading, kind: FindingKind) -> list[dict[str, object]]:
    return [each.facts for each in findings(reading.story, reading.source) if each.what is kind]


async def test_long_journal_is_split_and_adopted_from_its_newest_segment_alone(tmp_path):
    path = tmp_path / "j"
    driver = await Driver(path).start()
    await driver.turns(200)
    known = driver.kill()
    numbers = [*older_segments(path)]
    assert numbers == [*range(1, header_in(path).segment)] and len(numbers) > 5
    sizes = [each.stat().st_size for each in [*older_segments(path).values(), path]]
    assert max(sizes) < 2 * SMALL.least
    for each in older_segments(path).values():
        each.write_bytes(b"unreadable")
    archive = FileArchive(path)
    past = await archive.past()
    archive.close()
    assert past is not None and past.replayed < 50 and take_snapshot(past.membership) == known
    assert (past.job, past.term, past.header.writer) == ("a1", 1, FIRST)
    second = await Driver(path).start()
    second.journal.close()
    third = await Driver(path).start()
    third.journal.close()
    assert third.past is not None and third.past.term == 2


async def test_every_reader_reads_all_segments_as_one_journal(tmp_path):
    path, whole = tmp_path / "j", tmp_path / "whole"
    tail = JournalTail(path, Heard())
    driver, other = await Driver(path).start(), await Driver(whole, SegmentLimits()).start()
    for _ in range(40):
        for each in (driver, other):
            await each.turns(5)
        assert tail.look().heard == JournalTail(whole, Heard()).look().heard
    for each in (driver, other):
        each.journal.close()
    assert len(older_segments(path)) > 3 and not older_segments(whole)
    assert read(path) == read(whole)
    assert len(replay(path)) == 200
    one, two = read_journal(path), read_journal(whole)
    assert findings(one.story, one.source) == findings(two.story, two.source)


async def test_journal_without_its_older_segments_starts_at_a_snapshot(tmp_path):
    path = tmp_path / "j"
    driver = await Driver(path, replace(SMALL, kept=100_000)).start()
    await driver.turns(200)
    driver.journal.close()
    numbers = [*older_segments(path)]
    assert numbers[0] > 1 and numbers == [*range(numbers[0], header_in(path).segment)]
    sizes = [each.stat().st_size for each in older_segments(path).values()]
    assert sum(sizes) <= 100_000
    found = recording(path)
    assert found.start is not None and found.entries[-1][1].at == 200.0
    assert len(replay(path)) == len(found.entries) < 200
    reading = read_journal(path)
    assert reading.source.from_the_middle and reading.source.left_out == 0
    assert explained(reading, FindingKind.FROM_THE_MIDDLE) == [{"earlier_s": found.start.at}]
    [end] = explained(reading, FindingKind.CUT_OFF)
    assert end["after_s"] == 200.0, "since the start of the job"
    recorded("explain", as_text(reading))
    segment_path(path, numbers[1]).unlink()
    cut = recording(path)
    assert cut.start is not None and cut.start.at > found.start.at, (
        "segments before a gap are omitted"
    )


async def test_segments_of_another_job_are_not_read(tmp_path):
    path = tmp_path / "j"
    driver = await Driver(path).start()
    await driver.turns(200)
    driver.journal.close()
    last = max(older_segments(path))
    header = replaced_header(header_in(path), job="other", segment=last)
    segment_path(path, last).write_bytes(encoded(header) + b"no JSON\n")
    found = recording(path)
    assert found.start is not None and found.entries[-1][1].at == 200.0
    assert read_journal(path).source.left_out == 0


def replaced_header(header: Header, **changes) -> Header:
    return msgspec.structs.replace(header, **changes)


# ---- the switch ------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The driver's process is killed here."""


STEPS: list[tuple[object, str]] = [
    (journal_file, "remove_unfinished"),
    (journal_file, "write_all"),
    (journal_file, "_sync"),
    (journal_file, "keep_segment"),
    (os, "replace"),
    (journal_file, "prune"),
]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("module", "name"), STEPS, ids=[name for _, name in STEPS])
async def test_driver_killed_during_the_switch_loses_nothing(
    tmp_path, monkeypatch, module, name, before
):
    """Killed before or after each step. The next driver adopts the state, and the history is complete."""
    path = tmp_path / "j"
    driver = await Driver(path).start()
    await driver.turns(5)
    right = getattr(module, name)

    def killed(*args: Any, **kwargs: Any) -> None:
        if name == "write_all" and args[0] == driver.archive.fd:
            right(*args, **kwargs)  # an entry of the current segment
            return
        if not before:
            right(*args, **kwargs)
        raise Killed

    # A killed process unlinks nothing.
    monkeypatch.setattr(os, "unlink", lambda *args: None)
    monkeypatch.setattr(module, name, killed)
    with pytest.raises(Killed):
        await driver.turns(100)
    monkeypatch.undo()
    known = driver.kill()
    archive = FileArchive(path, SMALL)
    past = await archive.past()
    archive.close()
    assert past is not None and take_snapshot(past.membership) == known
    assert len(read(path)[1]) == int(driver.now)
    successor = await Driver(path).start()
    await successor.turns(100)
    successor.journal.close()
    assert successor.logged == [] and not next_path(path).exists()
    entries = read(path)[1]
    assert [each.at for each in entries] == [float(n + 1) for n in range(len(entries))]
    assert len(entries) == driver.now + 101
    assert len(replay(path)) == len(entries)


async def test_cancelled_switch_leaves_the_current_segment(tmp_path, monkeypatch):
    """A second Ctrl-C cancels the wait for the journal."""
    path = tmp_path / "j"
    driver = await Driver(path).start()

    async def never(function: Callable[..., object], *args: object, within_s: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(journal_file, "to_thread", never)
    with pytest.raises(asyncio.CancelledError):
        await driver.turns(100)
    monkeypatch.undo()
    assert header_in(path).segment == 1 and not next_path(path).exists()
    await driver.turns(100)
    driver.journal.close()
    assert len(read(path)[1]) == int(driver.now) and header_in(path).segment > 1


@pytest.mark.parametrize("name", ["write_all", "keep_segment"])
async def test_full_disk_during_the_switch_is_logged_and_the_journal_continues(
    tmp_path, monkeypatch, name
):
    path = tmp_path / "j"
    driver = await Driver(path).start()
    right = getattr(journal_file, name)

    def full(*args):
        if name == "keep_segment" or args[0] != driver.archive.fd:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(*args)

    monkeypatch.setattr(journal_file, name, full)
    await driver.turns(40)
    assert header_in(path).segment == 1 and not next_path(path).exists()
    assert len(driver.logged) == 1
    recorded("log", driver.logged)
    await driver.turns(40)
    assert len(driver.logged) == 2, "one attempt whenever the file has doubled"
    monkeypatch.undo()
    await driver.turns(200)
    driver.journal.close()
    assert header_in(path).segment > 1 and len(read(path)[1]) == 280


async def test_storage_that_does_not_respond_during_the_switch_delays_no_driver(
    tmp_path, monkeypatch
):
    path, responds = tmp_path / "j", threading.Event()
    driver = await Driver(path).start()
    monkeypatch.setattr(journal_file, "SYNC_S", 0.01)
    monkeypatch.setattr(journal_file, "_sync", lambda path: responds.wait(60.0))
    try:
        await driver.turns(40)
    finally:
        responds.set()
    driver.journal.close()
    assert header_in(path).segment == 1 and not next_path(path).exists()
    assert len(driver.logged) == 1
    recorded("log", driver.logged)
    assert len(read(path)[1]) == int(driver.now)


async def test_foreign_file_with_the_name_of_a_segment_is_neither_replaced_nor_deleted(tmp_path):
    path = tmp_path / "j"
    for name in (next_path(path), segment_path(path, 1)):
        name.write_text("my thesis")
        driver = await Driver(path).start()
        await driver.turns(40)
        driver.journal.close()
        assert len(driver.logged) == 1 and header_in(path).segment == 1
        recorded("log", driver.logged)
        assert name.read_text() == "my thesis"
        assert len(read(path)[1]) == int(driver.now)
        name.unlink()


async def test_file_system_without_links_keeps_only_the_newest_segment(tmp_path, monkeypatch):
    path = tmp_path / "j"

    def unsupported(*args, **kwargs):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", unsupported)
    driver = await Driver(path).start()
    await driver.turns(100)
    known = driver.kill()
    assert header_in(path).segment > 2 and [*tmp_path.iterdir()] == [path]
    assert driver.logged == []
    archive = FileArchive(path)
    past = await archive.past()
    archive.close()
    assert past is not None and take_snapshot(past.membership) == known
    assert recording(path).start is not None


async def test_segments_are_private_and_locked(tmp_path):
    path = tmp_path / "j"
    driver = await Driver(path).start()
    await driver.turns(100)
    for each in [path, *older_segments(path).values()]:
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    with raises(Invalid, 100):
        FileArchive(path)
    driver.journal.close()
    second = await Driver(path).start()
    await second.turns(100)
    with raises(Invalid, 300):
        FileArchive(path)
    second.journal.close()
    FileArchive(path).close()


async def test_driver_that_opened_the_previous_segment_locks_the_new_one(tmp_path, monkeypatch):
    """The file is replaced between the other driver's open and its lock."""
    path = tmp_path / "j"
    driver = await Driver(path).start()
    await driver.turns(5)
    right = fcntl.flock
    other = tmp_path / "other"
    shutil.copy(path, other)

    def replaced_meanwhile(fd, flags):
        if other.exists():
            driver.journal.close()
            os.replace(other, path)
        right(fd, flags)

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    archive = FileArchive(path)
    assert os.path.samestat(os.fstat(archive.fd), path.stat())
    archive.close()


async def test_switch_waits_until_no_worker_waits_but_not_forever(tmp_path):
    path = tmp_path / "j"
    waits = True
    membership = Membership(settings())
    policy = SnapshotPolicy(
        take=lambda: take_snapshot(membership), resumable=False, suits=lambda: not waits
    )
    log = await FileArchive(path, SMALL).begin(header_of(settings(), writer=FIRST), policy)

    async def write(until: Callable[[], bool]) -> int:
        size = 0
        for n in range(1000):
            if until():
                break
            event = hosts(n)
            log.record(float(n), event, membership.handle(event, float(n)))
            size = path.stat().st_size
            await log.settle()
            await log.rest()
        return size

    assert await write(lambda: header_in(path).segment == 2) >= OVERDUE * SMALL.least
    waits = False
    assert await write(lambda: header_in(path).segment == 3) < OVERDUE * SMALL.least
    log.close()


async def test_journal_from_which_no_driver_resumes_takes_snapshots_only_for_segments(tmp_path):
    path = tmp_path / "j"
    driver = await Driver(path, resumable=False).start()
    await driver.turns(100)
    driver.journal.close()
    segments = [*older_segments(path).values(), path]
    assert driver.shots == len(segments) - 1 > 1
    assert sum(each.read_bytes().count(b'\n{"snapshot":') for each in segments) == driver.shots
    assert len(read(path)[1]) == 100 == len(replay(path))


async def test_snapshots_of_a_resumable_journal_begin_its_segments(tmp_path):
    """A segment begins with a snapshot that is due anyway, so that the driver takes no additional ones."""
    path = tmp_path / "j"
    driver, other = (
        await Driver(path).start(),
        await Driver(tmp_path / "k", SegmentLimits()).start(),
    )
    for each in (driver, other):
        await each.turns(200)
        each.journal.close()
    assert header_in(path).segment > 5 and driver.shots == other.shots


async def test_copy_of_a_journal_in_etcd_is_split(tmp_path):
    path = tmp_path / "copy"
    membership = Membership(settings())
    policy = SnapshotPolicy(take=lambda: take_snapshot(membership), resumable=False)
    copy = await FileArchive(path, SMALL).begin(header_of(settings(), writer=FIRST), policy)
    journal = JournalCopy(Journal(), copy)
    for n in range(100):
        event = hosts(n)
        journal.record(float(n), event, membership.handle(event, float(n)))
        await journal.settle()
        await journal.rest()
    journal.close()
    assert header_in(path).segment > 2 and len(read(path)[1]) == 100


# ---- earlier jobs ----------------------------------------------------------------------------------------------------


async def test_segments_of_earlier_jobs_are_kept_with_their_journals(tmp_path):
    path = tmp_path / "j"
    told = []
    for number in range(KEPT + 2):
        driver = await Driver(path, resumable=False).start(f"job{number}")
        await driver.turns(40 + 5 * number)
        driver.journal.close()
        told.append(read(path))
    for number in range(1, KEPT + 1):
        kept = Path(f"{path}.{number}")
        assert older_segments(kept) and read(kept) == told[KEPT + 1 - number]
        assert recording(kept).header.job == f"job{KEPT + 1 - number}"
    assert read(path) == told[-1]
    others = {f"{path}.{KEPT + 1}", f"{path}.0"}
    assert not any(str(each).startswith(tuple(others)) for each in tmp_path.iterdir())


async def test_segments_of_earlier_jobs_count_towards_the_limit(tmp_path):
    path = tmp_path / "j"
    limits = replace(SMALL, kept=100_000)
    for number in range(4):
        driver = await Driver(path, limits, resumable=False).start(f"job{number}")
        await driver.turns(60)
        driver.journal.close()
    journals = [path, *(Path(f"{path}.{number}") for number in range(1, KEPT + 1))]
    sizes = [e.stat().st_size for each in journals for e in older_segments(each).values()]
    assert 2 * SMALL.least < sum(sizes) <= limits.kept
    assert older_segments(path), "those of the current job are the last to be deleted"
    assert not older_segments(journals[3]) and recording(journals[3]).start is not None


async def test_new_job_after_a_driver_killed_during_the_switch_has_its_own_segments(tmp_path):
    """The current segment has two names, until it is replaced."""
    path = tmp_path / "j"
    driver = await Driver(path, resumable=False).start()
    await driver.turns(100)
    driver.kill()
    os.link(path, segment_path(path, header_in(path).segment))
    before = read(path)
    driver = await Driver(path, resumable=False).start("next")
    await driver.turns(50)
    driver.journal.close()
    assert len(read(path)[1]) == 50 and read(Path(f"{path}.1")) == before
    assert len({each.stat().st_ino for each in tmp_path.iterdir()}) == len([*tmp_path.iterdir()])


async def test_names_of_segments_are_rejected_for_another_job(tmp_path):
    path = tmp_path / "j"
    check_own(segment_path(path, 1))
    FileJournal.begin(path, settings()).close()
    for each in (segment_path(path, 1), next_path(path)):
        with raises(Invalid):
            check_own(each)


async def test_journal_of_a_released_version_is_adopted_and_split(tmp_path):
    """Its header has no segment, and it has grown without a bound."""
    path = tmp_path / "j"
    driver = await Driver(path, SegmentLimits()).start()
    await driver.turns(200)
    driver.journal.close()
    data = path.read_bytes()
    assert data.count(b',"segment":1}') == 1
    path.write_bytes(data.replace(b',"segment":1}', b"}", 1))
    before = read(path)[1]
    adopted = await Driver(path).start()
    await adopted.turns(6)
    adopted.journal.close()
    assert header_in(path).segment == 2
    assert [*older_segments(path)] == [1] and read(path)[1][: len(before)] == before
    assert len(replay(path)) == len(before) + 7


# ---- adoption of simulated jobs --------------------------------------------------------------------------------------


def simulated(seed: int) -> Simulation:
    sim = Simulation(seed, workers=6, steps=60, faults=14, mild=True)
    sim.run()
    return sim


@pytest.mark.parametrize(
    ("seed", "every"),
    [
        *((n, 29) for n in range(1, 5)),
        *(pytest.param(n, 29, marks=pytest.mark.nightly) for n in range(5, 13)),
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.nightly),
    ],
)
async def test_simulated_job_is_adopted_at_any_time_and_makes_the_same_decisions(
    tmp_path, seed, every
):
    """Another driver adopts the job after every few entries and wherever the simulated driver crashed."""
    sim = simulated(seed)
    path = tmp_path / "j"
    membership = Membership(sim.settings)
    term = 1

    def policy() -> SnapshotPolicy:
        return SnapshotPolicy(take=lambda: take_snapshot(membership), snapshot_every=10)

    archive = FileArchive(path, replace(SMALL, least=10_000))
    journal = await archive.begin(header_of(sim.settings, job="a1", writer=FIRST), policy())
    for number, entry in enumerate(sim.driver.entries):
        if isinstance(entry.event, DriverRestarted) or number % every == every - 1:
            journal.close()
            archive = FileArchive(path, replace(SMALL, least=10_000))
            past = await archive.past()
            assert past is not None and past.term == term
            assert past.last_at == (sim.driver.entries[number - 1].at if number else 0.0)
            membership, term = past.membership, term + 1
            writer = replaced(FIRST, term=term, at=past.last_at)
            journal = await archive.go_on(past, writer, policy())
        actions = membership.handle(entry.event, entry.at, more=entry.more)
        assert actions == entry.actions
        journal.record(entry.at, entry.event, actions, more=entry.more)
        if not entry.more:
            await journal.settle()
            await journal.rest()
    journal.close()
    assert header_in(path).segment > 2 and term > 2
    assert read(path)[1] == sim.driver.entries
    assert len(replay(path)) == len(sim.driver.entries)
