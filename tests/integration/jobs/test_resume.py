"""Journals of drivers that are really killed, and of those that lose etcd's permission to write."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.driver.etcd.client import EtcdClient
from elastic.driver.etcd.journal import EtcdArchive
from elastic.driver.etcd.keys import job_root
from elastic.driver.etcd.leader_election import Leadership, LeadershipLost
from elastic.driver.events import DriverRestarted, StopRequested, TimePassed
from elastic.driver.journal.entries import Writer, header_of
from elastic.driver.journal.file_journal import FileArchive
from elastic.driver.journal.journal import SnapshotPolicy, replay
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from harness import wording
from harness.etcd import one_etcd
from harness.history import SCRIPTS

SETTINGS = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
WRITER = SCRIPTS / "journal_writer.py"


def driver(path: Path) -> subprocess.Popen[str]:
    """Writes entries, and tells each number once it may be acted upon."""
    command = [sys.executable, str(WRITER), str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def acted_upon(running: subprocess.Popen[str], until: int) -> int:
    """Return its last number, killed after ``until``."""
    assert running.stdout is not None
    last = -1
    for line in running.stdout:
        if line.endswith("\n"):
            last = int(line)
        if last == until:
            running.send_signal(signal.SIGKILL)
    running.wait()
    return last


def test_journal_contains_all_stops_that_a_killed_driver_acted_upon(tmp_path):
    """Killed anywhere, also between two parts of a line, and gone on with, again and again."""
    path = tmp_path / "journal.jsonl"
    least = 0
    for term, until in enumerate((3, 40, 111, 2), start=1):
        running = driver(path)
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == f"term {term}\n"
            if term == 1:
                with pytest.raises(Invalid, match=wording.PROCESS_NUMBER_WRITES % running.pid):
                    FileArchive(path)
            least += acted_upon(running, until) + 1
        finally:
            running.kill()
            running.wait()
            running.stdout.close()
        archive = FileArchive(path)
        past = asyncio.run(archive.past())
        archive.close()
        assert past is not None and past.term == term
        stops = len(replay(path))
        assert stops >= least, "those that were written and not acted upon may be more"
        least = stops


@pytest.mark.etcd
def test_replaced_driver_cannot_write_its_journal_in_etcd(tmp_path):
    async def first_and_second(etcd: EtcdClient, other: EtcdClient) -> None:
        one = Leadership(etcd, "night", lambda level, text: None)
        await one.acquire()
        membership = Membership(SETTINGS)
        archive = EtcdArchive(etcd, one, job_root("night"))
        assert await archive.past() is None
        header = header_of(
            SETTINGS, job="a1", command=["x"], outlives=True, writer=Writer(one.term)
        )
        policy = SnapshotPolicy(take=lambda: take_snapshot(membership), snapshot_every=50)
        journal = await archive.begin(header, policy)
        for n in range(130):
            now = float(n)
            journal.record(now, TimePassed(), membership.handle(TimePassed(), now))
            await journal.settle()
            await journal.rest()
        known = take_snapshot(membership)
        await one.resign()
        two = Leadership(other, "night", lambda level, text: None)
        await two.acquire()
        journal.record(200.0, StopRequested("x"), membership.handle(StopRequested("x"), 200.0))
        with pytest.raises(LeadershipLost):
            await journal.settle()
        archive = EtcdArchive(other, two, job_root("night"))
        past: RecoveredJob | None = await archive.past()
        assert past is not None and past.ended is None and take_snapshot(past.membership) == known
        assert (past.last_at, past.term) == (129.0, 1) and past.replayed < 100
        before = past.replayed
        journal = await archive.go_on(past, Writer(two.term, "h2:1"), SnapshotPolicy())
        actions = past.membership.handle(DriverRestarted(), 130.0)
        journal.record(130.0, DriverRestarted(), actions)
        await journal.settle()
        past = await archive.past()
        assert past is not None and (past.term, past.address) == (2, "h2:1")
        assert past.replayed == before + 1
        await two.resign()

    async def story(access) -> None:
        etcd, other = (EtcdClient(access, lambda level, text: None) for _ in range(2))
        try:
            await etcd.open()
            await other.open()
            await first_and_second(etcd, other)
        finally:
            await etcd.close()
            await other.close()

    with one_etcd(tmp_path) as cluster:
        asyncio.run(asyncio.wait_for(story(cluster.access), 30.0))
