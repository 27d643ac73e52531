"""A real driver with fifty hosts, whose agents use the real protocol; `benchmarks/control_plane.py` has more.

What is looked at does not depend on how busy the machine is: messages and bytes, no times.
"""

from __future__ import annotations

import json
from pathlib import Path

from elastic.chaos.invariants.invariants import check_journal
from harness import wording
from stress.load.agents import Adopted, Count, Counted, Lose, Together
from stress.load.job import LightJob

SLOTS = 8


def lose(job: LightJob, host: str) -> tuple[Together, Counted]:
    """The world without the host, and the number of messages of both sides."""
    job.order(Count())
    before = job.wait(Counted)
    job.order(Lose(host))
    together = job.wait(Together)
    job.order(Count())
    after = job.wait(Counted)
    return together, Counted(after.heard - before.heard, after.said - before.said)


def test_bytes_sent_to_each_worker_do_not_grow_with_the_world(tmp_path):
    few, many = bytes_to_each(16, tmp_path / "few"), bytes_to_each(400, tmp_path / "many")
    # Names, ranks and sizes have more digits, and that is all.
    assert many - few < 16, (few, many)


def bytes_to_each(workers: int, folder: Path) -> float:
    """When one host is lost."""
    folder.mkdir()
    with LightJob(workers, SLOTS, folder) as job:
        job.wait(Together, lambda it: it.size == workers)
        together, told = lose(job, "h1")
    survivors = workers - SLOTS
    assert together.size == survivors
    # One message to each host that its world is over, and one with the places of its workers ...
    assert told.heard == 2 * (survivors // SLOTS)
    # ... and from each that all of its workers are ready, and that all train.
    assert told.said == 2 * (survivors // SLOTS)
    return together.bytes_told / survivors


def test_successor_of_a_killed_driver_reconnects_all_hosts(tmp_path):
    workers = 400
    with LightJob(workers, SLOTS, tmp_path) as job:
        first = job.wait(Together, lambda it: it.size == workers)
        job.kill_driver()
        job.start_driver()
        assert job.wait(Adopted, lambda it: it.term == 2).agents == workers // SLOTS
        together, _ = lose(job, "h42")
        assert together.size == workers - SLOTS
        # Nobody was disturbed in between.
        assert together.generation == first.generation + 1
        log = (tmp_path / "log").read_text()
    assert log.count(wording.GOES_UNCHANGED) <= 1, "one line, not one for each worker"
    # Reports of the lost host may have been on their way when it went.
    again = reconnected_to_the_second_driver(job.journal)
    assert len([host for host, _ in again if host != "h42"]) == workers - SLOTS
    check_journal(job.journal, ended=False)


def reconnected_to_the_second_driver(journal: Path) -> set[tuple[str, int]]:
    """Host and slot of each worker."""
    whole, _, _ = journal.read_bytes().rpartition(b"\n")  # The driver may be writing the last line.
    lines = whole.splitlines()
    resumed = max(n for n, line in enumerate(lines) if line.startswith(b'{"resumed":'))
    entries = (json.loads(line) for line in lines[resumed:] if line.startswith(b'{"at":'))
    events = (entry["event"] for entry in entries)
    return {tuple(event["worker"][:2]) for event in events if event["type"] == "WorkerReconnected"}
