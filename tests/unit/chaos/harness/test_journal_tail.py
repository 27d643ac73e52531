"""Reading of a growing journal: members, process ids, number of commits; line by line."""

from __future__ import annotations

import os

from elastic.chaos.harness.journal_tail import JobProgress, JournalTail
from elastic.driver.events import (
    EndJob,
    Event,
    StopRequested,
    TimePassed,
    WorkerConnected,
    WorkerDigested,
    WorkerExited,
    WorkerResumed,
    WorkerReturned,
)
from elastic.driver.journal.entries import Entry, encoded
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker
from harness.published import published

A, B, C = (Worker("localhost", slot) for slot in range(3))


class Written:
    """A journal that is being written, and its follower."""

    journal: FileJournal

    def __init__(self, folder) -> None:
        self.path = folder / "journal.jsonl"
        self.follower = JournalTail(self.path, JobProgress())
        self.now = 0.0

    def begin(self) -> None:
        settings = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
        self.journal = FileJournal.begin(self.path, settings)

    def happens(self, event: Event, *actions) -> JobProgress:
        self.now += 1.0
        self.journal.record(self.now, event, actions)
        return self.follower.look()


def test_world_and_process_ids_follow_the_journal(tmp_path):
    written = Written(tmp_path)
    assert not written.follower.look().pids  # there is no file yet
    written.begin()
    assert not written.follower.look().pids  # the settings have no facts
    written.happens(WorkerConnected(B, 102))
    written.happens(WorkerConnected(A, 101))
    story = written.happens(TimePassed(), published(1, A, B))
    assert story.generation == 1
    assert story.present() == [A, B]
    assert story.arrived() == [B, A]
    assert story.pids == {A: 101, B: 102}
    story = written.happens(WorkerExited(A, -9))
    assert story.present() == [B]
    assert A not in story.pids
    written.happens(WorkerConnected(A.next(), 103))
    assert story.present() == [B]  # it is connected, but in no world
    story = written.happens(TimePassed(), published(2, B, A.next()))
    assert story.present() == [B, A.next()]
    assert story.arrived() == [B, A.next()]


def test_training_begins_with_the_first_collective_of_elastic_run(tmp_path):
    written = Written(tmp_path)
    written.begin()
    written.happens(TimePassed(), published(1, A, B))
    assert written.follower.story.began_at is None
    assert written.happens(WorkerResumed(A, 2, {})).began_at == 2.0
    assert written.happens(WorkerResumed(B, 2, {})).began_at == 2.0


def test_commit_counts_once_for_all_its_reports(tmp_path):
    written = Written(tmp_path)
    written.begin()

    def commits(worker: Worker, generation: int, number: int) -> int:
        event = WorkerDigested(worker, generation, Commit(generation, number), 1)
        return written.happens(event).commits

    assert commits(A, 2, 1) == 1
    assert commits(B, 2, 1) == 1
    assert commits(B, 2, 2) == 2
    assert commits(A, 2, 2) == 2
    assert commits(A, 3, 0) == 2  # the initial state of a world is no commit
    assert commits(A, 3, 1) == 3


def test_a_state_without_counted_steps_is_known_from_its_first_commit(tmp_path):
    written = Written(tmp_path)
    written.begin()
    # the initial state of a world
    assert not written.happens(WorkerDigested(A, 1, Commit(1, 0), 1)).no_steps
    assert not written.happens(WorkerDigested(A, 1, Commit(1, 1), 1, step=1)).no_steps
    assert written.happens(WorkerDigested(B, 1, Commit(1, 1), 1)).no_steps


def test_end_of_a_job_is_detected_before_its_processes_exit(tmp_path):
    for number, (event, actions) in enumerate(
        [
            (WorkerReturned(A, 2), ()),
            (StopRequested("Ctrl-C"), ()),
            (TimePassed(), (EndJob(1, as_sentence("too few")),)),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        written = Written(folder)
        written.begin()
        assert not written.happens(TimePassed()).ending
        assert written.happens(event, *actions).ending


def test_incomplete_line_is_processed_once_complete(tmp_path):
    written = Written(tmp_path)
    written.begin()
    written.happens(WorkerConnected(A, 101))
    whole = written.path.read_bytes()
    growing = tmp_path / "growing.jsonl"
    follower = JournalTail(growing, JobProgress())
    for end in range(1, len(whole) + 1):
        with growing.open("ab") as file:
            file.write(whole[end - 1 : end])
        heard = follower.look().pids
        assert heard == ({A: 101} if end == len(whole) else {})


def test_lines_that_are_no_entries_are_ignored(tmp_path):
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b'\n{\n[]\n{"journal": 1}\n\xff\xfe\n{"resumed": {"term": 2}}\n3\n')
    progress = JournalTail(journal, JobProgress()).look()
    assert (progress.pids, progress.generation, progress.ending) == ({}, 0, False)


def test_truncated_line_replaced_by_the_next_driver_is_read(tmp_path):
    written = Written(tmp_path)
    written.begin()
    assert written.happens(WorkerConnected(A, 101)).pids == {A: 101}
    whole = written.path.stat().st_size
    with written.path.open("ab") as file:
        file.write(b'{"at":2.0,"event":{"type":"WorkerConn')
    assert written.follower.look().pids == {A: 101}
    os.truncate(written.path, whole)
    with written.path.open("ab") as file:
        file.write(b'{"resumed":{"term":2}}\n{"snapshot":{},"at":2.0,"writer":{}}\n')
        file.write(encoded(Entry(3.0, WorkerConnected(B, 102), [published(1, A, B)])))
    story = written.follower.look()
    assert (story.pids, story.generation) == ({A: 101, B: 102}, 1)
