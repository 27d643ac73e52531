"""Pure parts of the multi-host benchmark: link rules, frame times, and the evaluation of steps and journals."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile

import msgspec
import pytest

from elastic.chaos.simulator.simulated_faults import FaultConditions
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.events import (
    DriverRestarted,
    Event,
    HostLost,
    HostReported,
    Member,
    PublishWorld,
    TimePassed,
    WorkerExited,
    WorkerReconnected,
)
from elastic.driver.journal.entries import Entry, Writer, header_of
from elastic.driver.journal.file_journal import FileArchive, FileJournal
from elastic.driver.journal.journal import SnapshotPolicy, recording, replay
from elastic.driver.journal.local_copy import copied_to
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.reasons import as_sentence
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Place
from elastic.protocol.messages import Worker as Name
from harness.golden import raises, recorded
from stress.__main__ import main
from stress.hosts import command, links
from stress.hosts.adoption import Adoptions
from stress.hosts.links import Link
from stress.hosts.merge_journals import join, term_of
from stress.hosts.netem import DelayedFrames
from stress.hosts.programs import HostProgram
from stress.hosts.random_faults import MOST_GAP_S, ON_DRIVERS, ON_ETCD, ON_HOSTS, SPARED, draw
from stress.hosts.report import Mark, ScenarioMeasurement, ScenarioOutcome, page, rows
from stress.hosts.scenarios import SCENARIOS
from stress.hosts.steps import Note, SurvivorSteps, WorkerNotes, aftermath, notes_of

# ---- links -----------------------------------------------------------------------------------------------------------


def rules(**by_host: Link) -> list[str]:
    lines = links.ruleset(by_host).splitlines()
    return [line.rpartition("passing ")[2] for line in lines if line.split()[:2] == ["add", "rule"]]


def test_link_without_faults_has_no_drop_rules():
    assert rules(a=Link(), b=Link(rate="10mbit", delay_s=0.1)) == []


def test_cut_link_drops_each_direction_separately():
    assert rules(a=Link(from_host=False)) == ['iifname "p-a" drop']
    assert rules(a=Link(to_host=False)) == ['oifname "p-a" drop']
    assert rules(a=Link(to_host=False, from_host=False), b=Link()) == [
        'iifname "p-a" drop',
        'oifname "p-a" drop',
    ]


def test_lossy_link_drops_packets_independently_in_both_directions():
    draw = "numgen random mod 10000 < 200 drop"
    assert rules(b=Link(loss=0.02)) == [f'iifname "p-b" {draw}', f'oifname "p-b" {draw}']


def test_rules_replace_the_previous_rules_atomically():
    first, second, third, *_ = links.ruleset({}).splitlines()
    # nft only deletes what exists, so the table is added first.
    assert [first, second, third] == [
        f"{verb} table {links.TABLE}" for verb in ("add", "delete", "add")
    ]


def test_slow_link_is_set_up_and_removed():
    words = " ".join(links.shaping("eth0", "10mbit"))
    recorded("messages", words)
    recorded("messages", " ".join(links.shaping("eth0", "")))


def test_fast_link_passes_several_frames_at_once_since_timers_are_coarse():
    assert "rate 100kbit burst 4000b" in " ".join(links.shaping("eth0", "100kbit"))
    assert "rate 1gbit burst 500000b" in " ".join(links.shaping("eth0", "1gbit"))


@pytest.mark.parametrize("fields", [{"loss": 1.0}, {"rate": "10mbit; reboot"}, {"delay_s": -1}])
def test_invalid_link_is_rejected(fields):
    with raises(Invalid):
        Link(**fields)


@pytest.mark.parametrize("name", ["", "a;b", "Host", "much-too-long-a-name"])
def test_invalid_interface_name_is_rejected(name):
    with raises(Invalid):
        links.check_name(name)


def test_frames_are_released_in_order_when_due():
    held = DelayedFrames(delay_s=0.1, most=3)
    assert held.next_at() is None
    for now, frame in (1.0, b"a"), (1.05, b"b"), (1.2, b"c"), (1.2, b"one too many"):
        held.put(now, frame)
    assert held.next_at() == pytest.approx(1.1)
    assert held.due(1.09) == []
    assert held.due(1.16) == [b"a", b"b"]
    assert held.due(9.0) == [b"c"]


# ---- programs --------------------------------------------------------------------------------------------------------


class Here:
    """This machine in place of a host."""

    popen = staticmethod(subprocess.Popen)


def test_reaped_program_is_sent_no_signal(tmp_path, monkeypatch):
    program = HostProgram(Here(), "true", ["true"], tmp_path)  # type: ignore[arg-type]
    assert program.wait() == 0
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    program.end()
    program.kill()
    assert sent == []  # its process ID may have been reused


# ---- steps -----------------------------------------------------------------------------------------------------------


def worker(host: str, *notes: tuple[float, str, int], size: int = 2) -> WorkerNotes:
    return WorkerNotes(host, [Note(at, kind, step, size) for at, kind, step in notes])


def came_through(host: str, *, again: float = 3.0) -> WorkerNotes:
    """Step 2 was in progress at the event at 2.2; it was started again at 2.9."""
    return worker(
        host,
        (1.0, "entered", 0),
        (1.1, "began", 1),
        (2.0, "committed", 1),
        (2.0, "began", 2),
        (2.9, "entered", 1),
        (2.9, "began", 2),
        (again, "committed", 2),
    )


def test_recovery_of_survivors_and_the_slowest_survivor_are_measured():
    died = worker("c", (1.0, "entered", 0), (2.0, "committed", 1), (2.0, "began", 2))
    joined = worker("d", (2.9, "entered", 1), (3.0, "committed", 2))
    found = aftermath([came_through("a"), came_through("b", again=3.4), died, joined], 2.2, 9.0)
    assert found.survivors == 2 and found.interrupted
    assert found.next_step_ms == pytest.approx(1200)
    assert found.pause_ms == pytest.approx(1400)
    assert (found.failed, found.lost) == (1, 0)


def test_step_committed_before_the_break_does_not_count_as_the_next_step():
    """A worker of a world that is about to break may still commit; that is not a recovery."""
    straggler = worker(
        "a",
        (1.0, "committed", 1),
        (2.3, "committed", 2),
        (4.0, "entered", 2),
        (4.5, "committed", 3),
    )
    assert aftermath([straggler], 2.2, 9.0).next_step_ms == pytest.approx(2300)


def test_nearly_finished_step_does_not_count_as_survival():
    """Cut off after the last collective of a step, a worker still commits and then waits forever."""
    cut_off = worker("d", (2.0, "committed", 1), (2.25, "committed", 2), (2.25, "began", 3))
    assert aftermath([came_through("a"), cut_off], 2.2, 9.0).survivors == 1
    assert aftermath([cut_off], 2.2, 9.0).survivors == 1  # no worker was interrupted


def test_worker_without_further_steps_is_not_counted_as_a_survivor():
    stuck = worker("a", (1.0, "committed", 1), (2.9, "entered", 1))
    assert aftermath([stuck], 2.2, 9.0).survivors == 0
    assert aftermath([stuck], 2.2, 9.0).next_step_ms is None
    steady = worker("b", (1.0, "committed", 1), (2.0, "committed", 2), (3.0, "committed", 3))
    found = aftermath([steady], 2.2, 9.0)
    assert (found.survivors, found.interrupted, found.failed) == (1, False, 0)
    assert found.next_step_ms == pytest.approx(800)
    assert found.pause_ms == pytest.approx(1000)


def test_later_interruptions_are_not_counted():
    """The link is restored at 5. That members then let the host join is a separate event."""
    notes = (1.0, "committed", 1), (3.0, "committed", 2), (6.0, "entered", 2), (7.0, "committed", 3)
    assert not aftermath([worker("a", *notes)], 2.2, until=5.0).interrupted
    assert aftermath([worker("a", *notes)], 5.0, until=9.0).interrupted


def test_commit_interrupted_by_a_planned_change_has_not_failed():
    """commit() saves first: the training function is called again at the step that was in progress."""
    planned = worker(
        "a", (1.0, "committed", 1), (1.0, "began", 2), (2.5, "entered", 2), (3.0, "committed", 3)
    )
    assert aftermath([planned], 2.2, 9.0).failed == 0


def test_committed_step_that_is_repeated_is_lost():
    bad = worker("a", (1.0, "committed", 1), (2.0, "committed", 2), (3.0, "entered", 0))
    again = worker("b", (1.0, "committed", 1), (3.0, "entered", 0))
    assert aftermath([bad, again], 2.2, 9.0).lost == 2


def test_notes_are_read_without_an_incomplete_last_line():
    assert notes_of("1.5 entered 0 4\n2.5 committed 1 4\n3.0 beg") == [
        Note(1.5, "entered", 0, 4),
        Note(2.5, "committed", 1, 4),
    ]
    for line in ("1.5 slept 0 4\n", "soon entered 0 4\n", "\n"):
        with raises(Invalid):
            notes_of(line)


# ---- adoption --------------------------------------------------------------------------------------------------------

A, B, C = (Name(host, 0) for host in "abc")


def record_event(adoptions: Adoptions, event: Event, *actions: PublishWorld) -> int:
    line = {"at": 1.0, "event": event, "actions": list(actions)}
    adoptions.update(msgspec.to_builtins(line))
    return adoptions.done


def world(*names: Name) -> PublishWorld:
    place = Place(0, len(names), 0, 1, 0, len(names))
    members = [Member(name, place) for name in names]
    return PublishWorld(1, members, Address("127.0.0.1", 1), 0, None, as_sentence("ready"))


def adopting() -> Adoptions:
    adoptions = Adoptions()
    record_event(adoptions, TimePassed(), world(A, B, C))
    assert record_event(adoptions, DriverRestarted()) == 0
    return adoptions


def test_driver_has_adopted_a_job_once_every_member_has_reported():
    adoptions = adopting()
    assert record_event(adoptions, WorkerReconnected(A, 1, True)) == 0
    assert record_event(adoptions, WorkerReconnected(B, 1, True)) == 0
    assert record_event(adoptions, WorkerReconnected(B, 1, True)) == 0  # reported twice
    assert record_event(adoptions, WorkerReconnected(C, 1, True)) == 1
    assert record_event(adoptions, WorkerReconnected(C, 1, True)) == 1
    record_event(adoptions, DriverRestarted())
    for name in A, B, C:
        record_event(adoptions, WorkerReconnected(name, 1, True))
    assert adoptions.done == 2


@pytest.mark.parametrize(
    "event", [WorkerExited(C, -9), HostLost("c", "silent"), HostReported("c", [], [C])]
)
def test_exited_worker_is_not_awaited(event):
    adoptions = adopting()
    for name in A, B:
        record_event(adoptions, WorkerReconnected(name, 1, True))
    assert (
        record_event(adoptions, HostReported("c", [C])) == 0
    )  # it runs, but has not reported its state
    assert (
        record_event(adoptions, HostReported("c", [], ordered=[])) == 0
    )  # it may be about to connect
    assert record_event(adoptions, event) == 1


# ---- consecutive journals --------------------------------------------------------------------------------------------


class Drivers:
    """A simulated job whose journal two drivers have written; the second continues from entry ``at``."""

    def __init__(self, folder, at: int = 60, *, busy_s: float = 0.0) -> None:
        weather = FaultConditions.drawn(2, mild=True)
        weather.busy_s = busy_s
        self.sim = Simulation(2, workers=6, steps=60, faults=14, mild=True, weather=weather)
        self.sim.run()
        self.at = at
        self.paths = [folder / "journal.1", folder / "journal.2"]
        self.joined = folder / "journal"
        self.entries = list(self.sim.driver.entries)

    def first(self, *, more: int) -> None:
        """Write ``more`` entries that the second driver does not know."""
        copy = FileJournal.begin(self.paths[0], self.sim.settings)
        for entry in self.entries[: self.at + more]:
            copy.append(entry)
        copy.close()

    def second(self) -> None:
        membership = Membership(self.sim.settings)
        for entry in self.entries[: self.at]:
            membership.handle(entry.event, entry.at, more=entry.more)
        header = header_of(self.sim.settings, writer=Writer(term=2, address="h2:1"))

        async def write() -> None:
            archive = FileArchive(self.paths[1])
            copy = await copied_to(
                archive, header, take_snapshot(membership), 1.0, SnapshotPolicy()
            )
            for entry in self.entries[self.at :]:
                copy.append(entry)
            copy.close()

        asyncio.run(write())

    def join(self) -> list[Entry]:
        join(self.paths, self.joined)
        return [entry for _, entry in recording(self.joined).entries]


@pytest.mark.parametrize("more", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_journals_of_two_drivers_join_without_unexecuted_entries(tmp_path, more):
    drivers = Drivers(tmp_path)
    drivers.first(more=more)
    drivers.second()
    assert [term_of(path) for path in drivers.paths] == [1, 2]
    assert drivers.join() == drivers.entries
    ((_, writer),) = recording(drivers.joined).takeovers
    assert (writer.term, writer.address) == (2, "h2:1")
    assert len(replay(drivers.joined)) == len(drivers.entries)


@pytest.mark.parametrize("at", [50, 55])
def test_journals_of_two_drivers_join_if_events_were_queued(tmp_path, at):
    """At 50, the first driver ends between two events that were queued together."""
    drivers = Drivers(tmp_path, at, busy_s=0.05)
    assert drivers.entries[49].more
    drivers.first(more=0)
    drivers.second()
    assert drivers.join() == drivers.entries
    assert len(replay(drivers.joined)) == len(drivers.entries)


def test_driver_that_continues_from_another_state_is_detected(tmp_path):
    drivers = Drivers(tmp_path)
    drivers.first(more=-3)
    drivers.second()
    with raises(Invalid):
        drivers.join()
    drivers.paths.reverse()
    with raises(Invalid):
        drivers.join()


def test_driver_that_never_led_has_term_zero(tmp_path):
    (tmp_path / "empty").touch()
    assert term_of(tmp_path / "empty") == term_of(tmp_path / "none") == 0


# ---- random faults ---------------------------------------------------------------------------------------------------


def test_seed_determines_faults_with_at_most_one_host_fault_per_round():
    assert draw(7, 20) == draw(7, 20) != draw(8, 20)
    assert draw(7, 20)[:5] == draw(7, 5)
    fates = set()
    for seed in range(40):
        for blows in draw(seed, 10):
            victims = [blow.victim for blow in blows if blow.victim]
            assert len(set(victims)) == len(victims) and SPARED not in victims
            for faults in ON_DRIVERS, ON_ETCD:
                assert sum(blow.kind in faults for blow in blows) <= 1
            assert blows and all(0 <= blow.gap_s <= MOST_GAP_S for blow in blows)
            fates |= {blow.kind for blow in blows}
    assert fates == {*ON_HOSTS, *ON_DRIVERS, *ON_ETCD}


# ---- the verdict -----------------------------------------------------------------------------------------------------

GOOD = SurvivorSteps(
    survivors=3, interrupted=True, next_step_ms=2300, pause_ms=2350, failed=1, lost=0
)


def measured(aftermath: SurvivorSteps = GOOD, **fields) -> ScenarioMeasurement:
    return ScenarioMeasurement("the link is cut", aftermath, **{"survivors": 3, **fields})


def test_measurement_within_its_limits_passes():
    mark = Mark(next_step_ms=2500, failed=1, interrupted=True)
    assert measured(mark=mark).troubles == []
    assert measured(mark=Mark(adopted_ms=2000), adopted_ms=800.0).troubles == []


@pytest.mark.parametrize(
    "given",
    [
        measured(mark=Mark(next_step_ms=2000)),
        measured(mark=Mark(failed=0)),
        measured(mark=Mark(interrupted=False)),
        measured(mark=Mark(adopted_ms=2000)),
        measured(mark=Mark(adopted_ms=2000), adopted_ms=2500.0),
        measured(survivors=4),
        measured(SurvivorSteps(3, True, None, 0, 0, 0)),
        measured(SurvivorSteps(3, True, 100, 0, 0, lost=2)),
    ],
)
def test_measurement_beyond_a_limit_is_reported(given):
    (trouble,) = given.troubles
    recorded("messages", trouble)


def test_busy_machine_only_extends_the_time_limits():
    mark = Mark(next_step_ms=2500, failed=0, interrupted=True).eased(2.0)
    assert mark == Mark(next_step_ms=5000, failed=0, interrupted=True)
    assert Mark(adopted_ms=2000).eased(2.0) == Mark(adopted_ms=4000)


def test_outcome_fails_without_comparisons_or_with_a_broken_journal():
    assert ScenarioOutcome("cut", [measured()], compared=9).passed
    for wrong in (
        ScenarioOutcome("cut", [measured()], compared=0),
        ScenarioOutcome("cut", [measured()], compared=9, differing=1),
        ScenarioOutcome("cut", [measured()], compared=9, lost=1),
        ScenarioOutcome("cut", [measured()], compared=9, broken=["ONE PER SLOT: ..."]),
        ScenarioOutcome("cut", failed="waited 30 s for the world"),
    ):
        assert not wrong.passed


def test_page_has_a_row_for_each_fault_and_the_failures_at_the_end():
    calm = SurvivorSteps(4, False, 40.0, 61.0, 0, 0)
    outcomes = [
        ScenarioOutcome("cut", [measured()], compared=9),
        ScenarioOutcome("driver", [measured(calm, survivors=4, adopted_ms=640.0)], compared=9),
        ScenarioOutcome("ssh", failed="waited 30 s\n  driver1 | no route"),
    ]
    (cut,), (driver,), (ssh,) = map(rows, outcomes)
    assert cut[2:8] == ["3", "2300 ms", "2350 ms", "1", "0", "-"]
    recorded("messages", driver[2:8])
    text = page(
        outcomes, command="chaos hosts", date="today", machine="this", setting="Four hosts."
    )
    recorded("messages", text)
    assert f"| {' | '.join(ssh)} |" in text
    recorded("messages", text)


def test_every_scenario_has_a_description():
    assert all((scenario.__doc__ or "").endswith(".") for scenario in SCENARIOS.values())


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "link-cut,flood"],
        ["--seed", "1", "--only", "link-cut"],
        ["--seed", "1", "--rounds", "0"],
        ["--report", "/no/such/folder/page.md"],
    ],
)
def test_invalid_arguments_are_refused(words, capsys):
    assert main(["hosts", *words]) == 2
    recorded("output", capsys.readouterr().err)


def test_users_other_than_root_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr("stress.hosts.namespaces.os.geteuid", lambda: 1000)
    assert main(["hosts", "--only", "link-cut"]) == 2
    recorded("output", capsys.readouterr().err)


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """The command without a network; the test chooses the scenario."""

    class NoBench:
        def __init__(self, folder) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *_) -> None: ...
        def start_etcd(self) -> None: ...

    monkeypatch.setattr(command, "HostCluster", NoBench)
    monkeypatch.setattr(command, "check_possible", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def late(bench):
        """Never ends."""
        raise AssertionError("waited 30 s for ['a'] to train")

    def good(bench):
        """Succeeds."""
        return ScenarioOutcome("good", [measured()], compared=9)

    for name, scenario in ("good", good), ("late", late):
        monkeypatch.setitem(SCENARIOS, name, scenario)
    return tmp_path / "page.md"


def test_command_runs_the_requested_scenarios_and_writes_its_page(stage, capsys):
    assert main(["hosts", "--only", "good", "--report", str(stage)]) == 0
    assert "PASSED" in capsys.readouterr().out
    assert f"python -m tests.stress hosts --only good --report {stage}" in stage.read_text()
    recorded("messages", stage.read_text())


def test_scenario_that_hangs_fails_and_the_next_scenario_runs(stage, capsys):
    assert main(["hosts", "--only", "late,good", "--report", str(stage)]) == 1
    printed = capsys.readouterr()
    assert "late: FAILED" in printed.err and "FAILED; " in printed.out
    recorded("output", printed.err)
    recorded("messages", stage.read_text())
    recorded("messages", stage.read_text())
