"""Journals of real jobs lead to the same decisions: complete, without their actions, and from the middle."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from elastic.chaos.invariants.invariants import check_journal
from elastic.chaos.simulator.simulated_faults import FaultConditions
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.events import Action, Event, Report
from elastic.driver.journal.entries import Entry, Line, decoded_header
from elastic.driver.journal.journal import ReplayDiffers, read, replay
from elastic.driver.journal.resume import past_of
from elastic.driver.monitoring.explain.journal_file import JournalEntries
from harness.kept_journals import (
    KEPT,
    as_bytes,
    from_the_middle,
    lines_of,
    unpacked,
    without_actions,
    written,
)

JOURNALS = sorted(KEPT.glob("*.xz"))
each_journal = pytest.mark.parametrize(
    "kept", JOURNALS, ids=lambda kept: kept.name.partition(".")[0]
)


def goes_on(header: bytes, lines: Sequence[Line]) -> int:
    """Return the events that the driver which resumes the job replays."""
    return past_of(decoded_header(header), as_bytes(lines)).replayed


@each_journal
def test_journal_replays_to_the_same_actions_and_keeps_the_invariants(kept, tmp_path):
    journal = unpacked(kept, tmp_path)
    assert len(replay(journal)) == len(read(journal)[1]) > 0
    check_journal(journal, ended=False)


@each_journal
def test_successor_resumes_from_a_kept_journal(kept, tmp_path):
    header, lines = lines_of(unpacked(kept, tmp_path))
    assert goes_on(header, lines) == sum(isinstance(line, Entry) for line in lines)


@each_journal
def test_successor_resumes_from_digests_of_the_actions(kept, tmp_path):
    header, lines = lines_of(unpacked(kept, tmp_path))
    archived = without_actions(lines)
    assert goes_on(header, archived) == sum(isinstance(line, Entry) for line in archived)


def test_digests_of_a_driver_that_handled_queued_events_lead_to_the_same_actions(tmp_path):
    weather = FaultConditions.drawn(2, mild=True)
    weather.busy_s = 0.05
    simulation = Simulation(2, workers=6, steps=60, faults=14, mild=True, weather=weather)
    simulation.run()
    entries = simulation.driver.entries
    assert sum(entry.more for entry in entries) > 10
    simulation.write_journal(tmp_path / "journal")
    header, lines = lines_of(tmp_path / "journal")
    archived = without_actions(lines)
    assert goes_on(header, archived) == len(entries)
    with JournalEntries(written(tmp_path / "archived", header, archived)) as found:
        assert [entry.actions for entry in found] == [entry.actions for entry in entries]


@each_journal
def test_successor_resumes_from_a_snapshot_in_the_middle(kept, tmp_path):
    header, lines = lines_of(unpacked(kept, tmp_path))
    later = from_the_middle(header, lines)
    assert len(replay(written(tmp_path / "middle", header, later))) == len(later) - 1


@each_journal
def test_reworded_log_lines_do_not_affect_a_replay(kept, tmp_path):
    header, lines = lines_of(unpacked(kept, tmp_path))
    for line in lines:
        if isinstance(line, Entry):
            line.actions = [reworded(action) for action in line.actions]
    assert replay(written(tmp_path / "reworded", header, lines))


def test_log_line_of_another_level_is_a_different_decision(tmp_path):
    """Like any other difference between the actions."""
    for kept in JOURNALS:
        header, lines = lines_of(unpacked(kept, tmp_path))
        for line in lines:
            if not isinstance(line, Entry):
                continue
            reports = [action for action in line.actions if isinstance(action, Report)]
            if reports:
                line.actions = [
                    msgspec.structs.replace(a, level="debug") if a is reports[0] else a
                    for a in line.actions
                ]
                with pytest.raises(ReplayDiffers):
                    replay(written(tmp_path / "other", header, lines))
                return
    pytest.fail("no journal has a log line")


def reworded(action: Action) -> Action:
    return (
        msgspec.structs.replace(action, text="in other words")
        if isinstance(action, Report)
        else action
    )


def test_kept_journals_contain_nearly_every_kind_of_event_and_action(tmp_path):
    found = set()
    for kept in JOURNALS:
        for entry in read(unpacked(kept, tmp_path))[1]:
            found |= {type(entry.event).__name__, *(type(each).__name__ for each in entry.actions)}
    known = {each.__name__ for each in (*Event.__subclasses__(), *Action.__subclasses__())}
    # jobs with several hosts or drivers, cancelled changes, health checks, and shards that are verified
    elsewhere = {
        "BandwidthMeasured",
        "CallOffChange",
        "DriverRestarted",
        "GiveUpHost",
        "HostLost",
        "HostStaying",
        "HostsQueued",
        "MeasureBandwidth",
        "ReplicasSpoilt",
        "TellWorld",
        "WorkerFoundMistake",
        "WorkerHealthChecked",
        "WorkerMerged",
        "WorkerMiscomputed",
        "WorkerReconnected",
        "WorkersReady",
        "WorkersResumed",
    }
    assert known - found <= elsewhere
