"""Journals are read as they were written, and replayed with the machine that wrote them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import stat
import time
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from elastic.chaos.__main__ import main as chaos
from elastic.chaos.harness.journal_tail import JobProgress, JournalTail
from elastic.chaos.invariants.invariants import BrokenInvariant, check_journal
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.events import (
    BreakWorld,
    DriverRestarted,
    EndJob,
    HostsChanged,
    Member,
    PublishWorld,
    StartWorker,
    StopRequested,
    TimePassed,
    WorkerExited,
    WorkerReady,
    WorkerResumed,
)
from elastic.driver.journal import file_journal as journal_file
from elastic.driver.journal import journal
from elastic.driver.journal.entries import (
    SNAPSHOT,
    Entry,
    Resumed,
    Writer,
    decoded,
    encoded,
    header_of,
)
from elastic.driver.journal.file_journal import FileArchive, FileJournal, check_own
from elastic.driver.journal.journal import Journal, ReplayDiffers, SnapshotPolicy, read, replay
from elastic.driver.journal.local_copy import JournalCopy
from elastic.driver.journal.snapshot_schedule import FORCED
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import SnapshotError, take_snapshot
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Commit, Place, Worker
from harness.golden import raises, recorded

A, B = Worker("h1", 0), Worker("h2", 0, 3)
PLACE = Place(0, 2, 0, 1, 0, 2)
WORLD = PublishWorld(
    4, [Member(A, PLACE)], Address("127.0.0.1", 4711), 1, Commit(3, 17), as_sentence("1 of 2 ready")
)


def settings(**changes) -> Settings:
    return Settings(np=2, workers_min=1, workers_max=2, elastic=True, **changes)


class Script:
    """A machine with constant answers to each type of event."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def handle(self, event, now, *, more=False):
        match event:
            case HostsChanged():
                return [
                    StartWorker(A, PLACE, as_sentence("first start")),
                    StartWorker(B, PLACE, as_sentence("first start")),
                ]
            case WorkerReady():
                return [WORLD]
            case WorkerExited():
                return [BreakWorld(4, [A], as_sentence(f"lost at {now}"))]
            case TimePassed():
                raise AssertionError("too late")
            case _:
                return [EndJob(1, as_sentence("asked"))]


CONVERSATION = [
    (0.1, HostsChanged({"h1": 1, "h2": 1})),
    (1.0 / 3, WorkerReady(A, 3, Commit(3, 17), Address("127.0.0.1", 4711), layout="x")),
    (7.25, WorkerExited(B, -9, output="last words\n")),
    (9.0, StopRequested("Ctrl-C")),
]


def written(path, machine, conversation=CONVERSATION, **changes):
    log = FileJournal.begin(path, settings(**changes))
    for at, event in conversation:
        log.record(at, event, machine.handle(event, at))
    log.close()
    return path


def test_written_journal_is_read_unchanged(tmp_path):
    path = written(tmp_path / "j", Script(settings()))
    found, entries = read(path)
    assert found == settings()
    assert [(e.at, e.event) for e in entries] == CONVERSATION
    assert entries[1].actions == [WORLD]


@pytest.mark.parametrize(
    ("event", "defaults"),
    [
        (
            WorkerReady(A, 3, Commit(3, 17), Address("127.0.0.1", 4711)),
            b'"layout":"","running":true,"number":0,"shards":null,"kept":[[]],"step":null,"own_pace":false',
        ),
        (
            WorkerResumed(A, 4, {"told": 1.0}),
            b'"copied_bytes":0,"from_checkpoint":false,"shards":null',
        ),
    ],
)
def test_defaults_of_frequent_events_are_omitted_and_read_from_older_journals(event, defaults):
    line = encoded(Entry(1.0, event))
    assert not any(name in line for name in re.findall(rb'"\w+":', defaults))
    older = line[: -len(b"}}\n")] + b"," + defaults + b"}}\n"
    assert decoded(line) == decoded(older) == Entry(1.0, event)


async def test_entry_when_another_event_is_queued_then_is_written_with_the_next_entry(tmp_path):
    path = tmp_path / "j"
    log = FileJournal.begin(path, settings())
    event = WorkerReady(A, 3, Commit(3, 17), Address("127.0.0.1", 4711), layout="x")

    def times() -> list[float]:
        return [entry.at for entry in read(path)[1]]

    log.record(1.0, event, more=True)
    log.record(2.0, event, more=True)
    assert times() == []
    log.record(3.0, event)
    assert times() == [1.0, 2.0, 3.0]
    log.record(4.0, event, more=True)
    await log.settle()
    assert times() == [1.0, 2.0, 3.0, 4.0]
    log.record(5.0, event, more=True)
    log.trouble(6.0, as_sentence("etcd is unreachable"))
    assert times()[-1] == 5.0
    log.record(7.0, event, more=True)
    log.close()
    assert times() == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]


async def test_copy_when_a_journal_is_settled_then_contains_all_entries(tmp_path):
    paths = [tmp_path / "first", tmp_path / "copy"]
    log = JournalCopy(*(FileJournal.begin(path, settings()) for path in paths))
    log.record(1.0, HostsChanged({"h1": 1}), more=True)
    await log.settle()
    assert [len(read(path)[1]) for path in paths] == [1, 1]
    log.close()


def test_replay_returns_events_and_actions(tmp_path):
    path = written(tmp_path / "j", Script(settings()))
    pairs = replay(path, Script)
    assert [event for event, _ in pairs] == [event for _, event in CONVERSATION]
    assert pairs[2][1] == [BreakWorld(4, [A], as_sentence("lost at 7.25"))]


def test_replay_of_membership_agrees(tmp_path):
    machine = Membership(settings())
    hosts = (0.0, HostsChanged({"h1": 1, "h2": 1}))
    path = written(tmp_path / "j", machine, [hosts, (1.0, StopRequested("enough"))])
    actions = [action for _, actions in replay(path) for action in actions]
    assert [type(a) for a in actions] == [StartWorker, StartWorker, EndJob]


def test_replay_names_the_first_difference(tmp_path):
    path = written(tmp_path / "j", Script(settings()))

    class Changed(Script):
        def handle(self, event, now, *, more=False):
            if isinstance(event, WorkerExited):
                return [BreakWorld(5, [A], as_sentence("another reason"))]
            return super().handle(event, now, more=more)

    with raises(ReplayDiffers):
        replay(path, Changed)


def test_missing_action_is_a_difference(tmp_path):
    path = written(tmp_path / "j", Script(settings()))

    class Lazy(Script):
        def handle(self, event, now, *, more=False):
            return super().handle(event, now, more=more)[:1]

    with raises(ReplayDiffers):
        replay(path, Lazy)


def test_event_that_raised_must_raise_again(tmp_path):
    log = FileJournal.begin(tmp_path / "j", settings())
    log.record(1.0, TimePassed(), error="AssertionError: too late")
    log.close()
    assert replay(tmp_path / "j", Script) == [(TimePassed(), [])]

    log = FileJournal.begin(tmp_path / "j", settings())
    log.record(1.0, StopRequested("x"), error="AssertionError: too late")
    log.close()
    with raises(ReplayDiffers):
        replay(tmp_path / "j", Script)


def test_each_event_is_in_the_file_at_once(tmp_path):
    log = FileJournal.begin(tmp_path / "j", settings())
    log.record(1.0, TimePassed())
    assert json.loads((tmp_path / "j").read_text().splitlines()[1]) == {
        "at": 1.0,
        "event": {"type": "TimePassed"},
    }
    log.close()


def test_incomplete_last_line_is_ignored(tmp_path):
    path = written(tmp_path / "j", Script(settings()))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(replay(path, Script)) == len(CONVERSATION) - 1


def test_journal_is_private_and_contains_no_secret(tmp_path):
    path = tmp_path / "j"
    path.touch(0o644)
    written(path, Script(settings()), env={"TOKEN": "hunter2"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "hunter2" not in path.read_text()
    assert read(path)[0].env == {"TOKEN": ""}


def test_history_has_the_latest_events(tmp_path):
    log = Journal()
    recorded("log", log.story())
    for n in range(300):
        log.record(float(n), StopRequested(f"n{n}"), [EndJob(1, as_sentence("x"))])
    story = log.story()
    assert "n99'" not in story and "n100'" in story and "n299'" in story
    assert "-> EndJob code=1 reason='x'" in story


def test_full_disk_ends_the_journal_but_not_the_job():
    logged: list[str] = []
    log = FileJournal.begin(Path("/dev/full"), settings(), SnapshotPolicy(failed=logged.append))
    log.record(1.0, TimePassed())
    log.record(2.0, TimePassed())
    recorded("log", logged)


def test_invalid_files_are_rejected(tmp_path):
    with raises(Invalid):
        FileJournal.begin(tmp_path / "missing" / "j", settings())
    with raises(Invalid):
        read(tmp_path / "none")
    (tmp_path / "text").write_text("hello\n")
    with raises(Invalid):
        read(tmp_path / "text")
    (tmp_path / "empty").touch()
    with raises(Invalid):
        read(tmp_path / "empty")
    path = written(tmp_path / "j", Script(settings()))
    path.write_text(path.read_text().replace('"at":9.0', '"at":nine'))
    with raises(Invalid):
        read(path)


def test_program_prints_the_history_and_the_result_of_the_replay(tmp_path, capsys):
    hosts = (5.0, HostsChanged({"h1": 1, "h2": 1}))
    path = written(tmp_path / "good", Membership(settings()), [hosts])
    assert journal.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "    +0.000  HostsChanged hosts={'h1': 1, 'h2': 1}" in out
    assert "-> StartWorker worker=h1:0#1" in out
    recorded("messages", out)

    path = written(tmp_path / "bad", Script(settings()), [hosts])
    assert journal.main([str(path)]) == 1
    recorded("output", capsys.readouterr().err)

    assert journal.main([str(tmp_path / "none")]) == 2
    assert journal.main([]) == 2


# ---- several drivers -------------------------------------------------------------------------------------------------


def resumed_job(path, *, every: int = 10**6, seed: int = 2, torn: bool = False) -> int:
    """Simulate a job whose driver is replaced at each restart and a few more times. Return the number of drivers."""
    sim = Simulation(seed, workers=6, steps=60, faults=14, mild=True)
    sim.run()
    membership = Membership(sim.settings)
    drivers = 1

    async def write() -> None:
        nonlocal drivers, membership

        def policy() -> SnapshotPolicy:
            return SnapshotPolicy(take=lambda: take_snapshot(membership), snapshot_every=every)

        archive = FileArchive(path)
        journal = await archive.begin(header_of(sim.settings, job="a1"), policy())
        for entry in sim.driver.entries:
            if isinstance(entry.event, DriverRestarted):
                journal.close()
                if torn:
                    with path.open("ab") as file:
                        file.write(b'{"at":1,"event":{"type":"WorkerPro')
                archive = FileArchive(path)
                past = await archive.past()
                assert past is not None
                membership, drivers = past.membership, drivers + 1
                journal = await archive.go_on(past, Writer(drivers, f"h{drivers}:1"), policy())
            actions = membership.handle(entry.event, entry.at)
            assert actions == entry.actions
            journal.record(entry.at, entry.event, actions)
            await journal.rest()
        journal.close()

    asyncio.run(write())
    return drivers


@pytest.fixture(scope="module")
def crashing() -> int:
    """Return a seed with which the driver crashes often."""
    for seed in range(1, 60):
        sim = Simulation(seed, workers=6, steps=60, faults=14, mild=True)
        sim.run()
        if sum(isinstance(e.event, DriverRestarted) for e in sim.driver.entries) > 1:
            return seed
    raise AssertionError("no driver crashes any more")


@pytest.mark.parametrize(("every", "torn"), [(10**6, False), (25, True)])
def test_every_reader_supports_journals_of_several_drivers(tmp_path, capsys, crashing, every, torn):
    path = tmp_path / "j"
    drivers = resumed_job(path, every=every, seed=crashing, torn=torn)
    assert drivers > 2 and (b'{"snapshot":' in path.read_bytes()) is (every < 1000)
    _, entries = read(path)
    assert len(replay(path)) == len(entries) > 50
    assert check_journal(path).worlds > 1
    assert journal.main([str(path)]) == 0
    assert f"term {drivers} at h{drivers}:1" in capsys.readouterr().out
    assert chaos(["check", str(path)]) == 0
    assert chaos(["replay", "--story", str(path)]) == 0
    assert re.search(rf"^{drivers} .*drivers", capsys.readouterr().out, re.M)
    follower = JournalTail(path, JobProgress())
    assert follower.look().ending and follower.story.generation == max(
        action.generation
        for entry in entries
        for action in entry.actions
        if isinstance(action, PublishWorld)
    )


def test_terms_increase_and_each_successor_writes_its_term_first(tmp_path, crashing):
    path = tmp_path / "j"
    resumed_job(path, seed=crashing)
    right = path.read_text()
    path.write_text(right.replace('"resumed":{"term":3', '"resumed":{"term":2'))
    with raises(BrokenInvariant):
        check_journal(path)
    path.write_text(
        "".join(line for line in right.splitlines(True) if '"type":"DriverRestarted"' not in line)
    )
    with raises(BrokenInvariant):
        check_journal(path)


def test_copy_that_starts_in_the_middle_can_be_replayed(tmp_path, capsys):
    sim = Simulation(2, workers=6, steps=60, faults=14, mild=True)
    sim.run()
    membership = Membership(sim.settings)
    for entry in sim.driver.entries[:100]:
        membership.handle(entry.event, entry.at)
    path = tmp_path / "j"
    log = FileJournal.begin(path, sim.settings)
    log.keep_snapshot(take_snapshot(membership), sim.driver.entries[99].at)
    for entry in sim.driver.entries[100:]:
        log.record(entry.at, entry.event, entry.actions)
    log.close()
    assert len(replay(path)) == len(sim.driver.entries) - 100
    assert chaos(["replay", str(path)]) == 0
    recorded("output", capsys.readouterr().out)
    with raises(Invalid):
        check_journal(path)


# ---- the file --------------------------------------------------------------------------------------------------------


def past_in(path):
    archive = FileArchive(path)
    try:
        return asyncio.run(archive.past())
    finally:
        archive.close()


def test_second_driver_is_rejected_with_the_writer(tmp_path):
    log = FileJournal.begin(tmp_path / "j", settings())
    log.record(1.0, TimePassed())
    with raises(Invalid, os.getpid()):
        FileJournal.begin(tmp_path / "j", settings())
    assert len(read(tmp_path / "j")[1]) == 1, "and has done no harm"
    log.close()
    FileJournal.begin(tmp_path / "j", settings()).close()


def test_journals_of_previous_jobs_are_kept(tmp_path):
    path = tmp_path / "j"
    contents = []
    for _ in range(journal_file.KEPT + 2):
        written(path, Script(settings()))
        contents.append(path.read_bytes())
    names = ["j", *(f"j.{number}" for number in range(1, journal_file.KEPT + 1))]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [(tmp_path / name).read_bytes() for name in names] == contents[:0:-1]
    assert stat.S_IMODE((tmp_path / "j.1").stat().st_mode) == 0o600


def test_journal_that_cannot_be_kept_is_not_replaced(tmp_path, monkeypatch):
    path = written(tmp_path / "j", Script(settings()))
    before = path.read_bytes()
    full = create_autospec(shutil.copyfileobj, side_effect=OSError(errno.ENOSPC, "No space left"))
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with raises(Invalid):
        FileJournal.begin(path, settings())
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
    monkeypatch.undo()
    FileJournal.begin(path, settings()).close()  # the file is free again


def test_other_file_is_not_overwritten(tmp_path):
    path = tmp_path / "thesis"
    for text in ("my thesis", "my thesis\n", '{"a": 1}\n'):
        path.write_text(text)
        path.chmod(0o755)
        with raises(Invalid):
            FileJournal.begin(path, settings())
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_text() == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_journal_can_be_written_to_a_pipe_and_is_not_resumable(tmp_path):
    """As with --journal >(gzip >j.gz): reading it would wait for this process."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    archive = FileArchive(path)
    assert not archive.outlives()
    FileJournal(archive, header_of(settings()), 0, None).close()
    assert os.read(reader, 11) == b'{"journal":'
    os.close(reader)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.write_text("notes")])
def test_other_file_is_not_renamed_to_make_room(tmp_path, make):
    """Its name is that of a kept journal, or the one from which the previous journal is renamed."""
    path = written(tmp_path / "j", Script(settings()))
    before = path.read_bytes()
    for number in (1, journal_file.KEPT):
        other = tmp_path / f"j.{number}"
        make(other)
        known = os.lstat(other)
        with raises(Invalid, number):
            FileJournal.begin(path, settings())
        assert os.lstat(other) == known and path.read_bytes() == before
        assert {*tmp_path.iterdir()} == {path, other}
        other.rename(tmp_path.with_name(f"{tmp_path.name}-{number}"))


@pytest.mark.parametrize("number", [1, journal_file.KEPT])
def test_path_of_a_kept_journal_is_rejected_for_another_job(tmp_path, number):
    path, kept = tmp_path / "j", tmp_path / f"j.{number}"
    theirs = written(kept, Membership(settings()), CONVERSATION[:1]).read_bytes()  # older than j
    check_own(kept)
    beside = FileJournal.begin(tmp_path / f"j.{journal_file.KEPT + 1}", settings())
    before = written(path, Script(settings())).read_bytes()
    refused = (
        rf"j\.{number}' is reserved for a rotated copy of the journal .*/j': pass another file"
    )
    with pytest.raises(Invalid, match=refused):
        FileJournal.begin(kept, settings())
    beside.close()
    assert kept.read_bytes() == theirs and path.read_bytes() == before
    assert past_in(kept) is not None, "a job that began there goes on there"


def test_journal_in_use_is_not_renamed(tmp_path):
    theirs = FileJournal.begin(tmp_path / "j.2", settings())
    for _ in range(2):  # also before there is a journal to keep
        with raises(Invalid, os.getpid()):
            FileJournal.begin(tmp_path / "j", settings())
        (tmp_path / "j").write_text('{"journal":')
    theirs.close()
    FileJournal.begin(tmp_path / "j", settings()).close()
    assert (tmp_path / "j.3").exists()


def test_foreign_files_beside_a_journal_are_neither_written_nor_made_readable(tmp_path):
    """The copy needs a temporary name until it is complete."""
    path = written(tmp_path / "j", Script(settings()))
    before = path.read_bytes()
    theirs = tmp_path / "notes"
    theirs.write_text("mine")
    (tmp_path / "j.new").symlink_to(theirs)
    FileJournal.begin(path, settings()).close()
    assert theirs.read_text() == "mine" and (tmp_path / "j.new").is_symlink()
    assert (tmp_path / "j.1").read_bytes() == before and not (tmp_path / "j.1").is_symlink()


def test_other_file_is_never_resumed_from(tmp_path):
    path = tmp_path / "j"
    assert past_in(path) is None, "there is none"
    for text in ('{"jour', '{"journal":1,"date":"x"'):
        path.write_text(text)
        assert past_in(path) is None, "a driver was killed while it began"
    for text in ("my thesis", "my thesis\n", '{"a": 1}\n'):
        path.write_text(text)
        with raises(Invalid):
            past_in(path)
        assert path.read_text() == text
    path.write_text('{"journal":1}\n')
    with raises(Invalid):
        past_in(path)


def test_journal_may_be_truncated_anywhere(tmp_path):
    path = written(
        tmp_path / "j", Membership(settings()), [CONVERSATION[0], (9.0, StopRequested("x"))]
    )
    whole = path.read_bytes()
    starts = [at + 1 for at, byte in enumerate(whole) if byte == 0x0A]
    for end in {*range(starts[0], len(whole), 11), *starts, starts[-1] - 1}:
        path.write_bytes(whole[:end])
        assert past_in(path).replayed == sum(start <= end for start in starts) - 1


def test_large_journal_is_read_from_its_last_snapshot(tmp_path):
    """100 MB before the snapshot are not read; nor are they after its first line."""
    path = tmp_path / "j"
    log = FileJournal.begin(path, settings())
    membership = Membership(settings())
    log.record(1.0, CONVERSATION[0][1], membership.handle(CONVERSATION[0][1], 1.0))
    log.close()
    with path.open("ab") as file:
        file.seek(100 << 20, os.SEEK_CUR)
        file.write(b"no JSON\n")
    archive = FileArchive(path)
    log = FileJournal(archive, Resumed(Writer(2)), path.stat().st_size, None)
    log.keep_snapshot(take_snapshot(membership), 1.0)
    log.record(2.0, TimePassed(), membership.handle(TimePassed(), 2.0))
    log.close()
    began = time.thread_time()
    past = past_in(path)
    took = time.thread_time() - began
    assert (past.replayed, past.last_at, past.term) == (1, 2.0, 2) and took < 0.2, took
    assert take_snapshot(past.membership) == take_snapshot(membership)


@pytest.mark.slow
def test_snapshot_across_two_blocks_is_found(tmp_path, monkeypatch):
    path = tmp_path / "j"
    resumed_job(path, every=25)
    data = path.read_bytes()
    with path.open("rb") as file:
        for block in range(15, 60):
            monkeypatch.setattr(journal_file, "BLOCK", block)
            for what in (b"\n" + SNAPSHOT, b"\n", b"nowhere"):
                assert journal_file._last(file.fileno(), what, len(data)) == data.rfind(what)


def test_snapshots_wait_a_limited_time_for_an_idle_moment(tmp_path):
    shots: list[int] = []

    def take() -> bytes:
        shots.append(len(entries))
        return b'{"s": "%s"}' % (b"x" * 591)

    entries: list[int] = []
    log = FileJournal.begin(
        tmp_path / "j", settings(), SnapshotPolicy(take=take, snapshot_every=10)
    )
    for n in range(15):
        entries.append(n)
        log.record(float(n), TimePassed())
    assert not shots
    asyncio.run(log.rest())
    asyncio.run(log.rest())
    assert shots == [15]
    for n in range(16 * FORCED):
        entries.append(n)
        log.record(20.0, TimePassed())
    # 10 * FORCED entries would suffice, but are smaller than FORCED snapshots of 600 bytes.
    line = encoded(Entry(20.0, TimePassed()))
    assert shots == [15, 15 + -(-600 * FORCED // len(line))]


def test_snapshots_wait_until_no_event_is_pending(tmp_path):
    shots: list[int] = []
    gathering = True

    def take() -> bytes:
        shots.append(1)
        return b'{"s": 1}'

    policy = SnapshotPolicy(take=take, snapshot_every=10, suits=lambda: not gathering)
    log = FileJournal.begin(tmp_path / "j", settings(), policy)
    for n in range(12):
        log.record(float(n), TimePassed())
        asyncio.run(log.rest())
    assert not shots
    gathering = False
    asyncio.run(log.rest())
    assert shots == [1]


def test_incomplete_journal_is_not_resumed_from(tmp_path, monkeypatch):
    logged: list[str] = []
    path = tmp_path / "j"
    log = FileJournal.begin(
        path, settings(), SnapshotPolicy(take=lambda: b"{}", failed=logged.append)
    )
    log.record(1.0, TimePassed())

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.record(2.0, TimePassed())
    recorded("log", logged)
    archive = FileArchive(path)
    with raises(Invalid):
        asyncio.run(archive.past())
    archive.close()


def test_failed_snapshot_only_ends_the_snapshots(tmp_path):
    logged: list[str] = []

    def take() -> bytes:
        raise SnapshotError("a snapshot can't hold a socket")

    policy = SnapshotPolicy(take=take, snapshot_every=1, failed=logged.append)
    log = FileJournal.begin(tmp_path / "j", settings(), policy)
    for n in range(FORCED + 3):
        log.record(float(n), TimePassed())
    log.close()
    recorded("log", logged)
    assert len(read(tmp_path / "j")[1]) == FORCED + 3
