"""The fault matrix as a plan: every cell is possible or has a reason, ends in one way, and some cover all pairs."""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import threading
from unittest.mock import create_autospec

import pytest

from elastic.driver.reasons import ReasonKind
from elastic.errors import Invalid
from elastic.failpoints.rules import parse
from harness.golden import recorded
from stress.fault_matrix import cells as faults
from stress.fault_matrix import command, expectations, page
from stress.fault_matrix.cells import Cell
from stress.fault_matrix.expectations import (
    ExpectedEnd,
    Result,
    batches,
    expected,
    fault_rules,
    is_first,
    is_last,
    shuts_connections,
)
from stress.fault_matrix.job import MatrixJob
from stress.fault_matrix.journal_facts import JournalFacts

MEMBERS = ["h:0#1", "h:1#1", "h:2#1", "h:3#1"]
POSSIBLE = [cell for cell in faults.all_cells() if not faults.impossible(cell)]


def asked(victim: str, fault: str, phase: str) -> list[str]:
    return fault_rules(Cell(victim, fault, phase), MEMBERS, "h:3#1", "x", "/go", step=7).rules


# ---- the axes ------------------------------------------------------------------------------------


def test_each_cell_exists_once():
    cells = list(faults.all_cells())
    assert len(cells) == len(set(cells)) == 8 * 12 * 23


def test_every_victim_except_the_agent_and_every_fault_and_phase_is_possible():
    assert {cell.victim for cell in POSSIBLE} == faults.VICTIMS.keys() - {faults.AGENT}
    assert {cell.fault for cell in POSSIBLE} == faults.FAULTS.keys()
    assert {cell.phase for cell in POSSIBLE} == faults.PHASES.keys()


@pytest.mark.parametrize(
    "cell",
    [
        Cell(faults.AGENT, faults.KILL, faults.FORWARD),
        Cell(faults.DRIVER, faults.RAISE, faults.FORWARD),
        Cell(faults.MIDDLE, faults.KILL, faults.COPY),
        Cell(faults.JOINER, faults.KILL, faults.RESET),
        Cell(faults.LAST, faults.DROP, faults.BEFORE_INIT),
        Cell(faults.LAST, faults.SHUT, faults.RESET),
        Cell(faults.LAST, faults.KILL, faults.MANIFEST),
        Cell(faults.LAST, faults.KILL, faults.STANDBY),
        Cell(faults.LAST, faults.KILL, faults.SHARD_COPY),
        Cell(faults.ALL_BUT_ONE, faults.KILL, faults.SHARD_TRAVEL),
    ],
)
def test_impossible_cell_has_a_reason(cell):
    recorded("messages", faults.impossible(cell))


# ---- ends of cells -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "fault", "phase", "end"),
    [
        (faults.RANK_0, faults.KILL, faults.BUCKET, ExpectedEnd.RECOVERS),
        (faults.RANK_0, faults.TERM, faults.BUCKET, ExpectedEnd.LEAVES),
        (faults.RANK_0, faults.TERM, faults.BEFORE_INIT, ExpectedEnd.RECOVERS),
        (faults.RANK_0, faults.SHUT, faults.BUCKET, ExpectedEnd.REGROUPS),
        (faults.ALL_BUT_ONE, faults.SLOW, faults.SNAPSHOT, ExpectedEnd.GOES_ON),
        (faults.MIDDLE, faults.RAISE, faults.STEP, ExpectedEnd.RECOVERS),
        (faults.TWO, faults.RAISE, faults.STEP, ExpectedEnd.JOB_ENDS),
        (faults.TWO, faults.RAISE, faults.BEFORE_INIT, ExpectedEnd.RECOVERS),
        (faults.LAST, faults.KILL, faults.SHUTDOWN, ExpectedEnd.FAILS),
        (faults.LAST, faults.STOP, faults.SHUTDOWN, ExpectedEnd.SUCCEEDS),
        (faults.TWO, faults.RAISE, faults.WRITING, ExpectedEnd.GOES_ON),
        (faults.RANK_0, faults.DISK, faults.RESUME, ExpectedEnd.GOES_ON),
        (faults.RANK_0, faults.GIL, faults.RESUME, ExpectedEnd.GOES_ON),
        (faults.RANK_0, faults.KILL, faults.RESUME, ExpectedEnd.RECOVERS),
        (faults.JOINER, faults.TERM, faults.PREPARED, ExpectedEnd.RECOVERS),
        (faults.MIDDLE, faults.KILL, faults.SHARD_MIRROR, ExpectedEnd.RECOVERS),
        (faults.ALL_BUT_ONE, faults.SEGV, faults.SHARD_SEAL, ExpectedEnd.RECOVERS),
        (faults.TWO, faults.RAISE, faults.SHARD_PLACING, ExpectedEnd.JOB_ENDS),
        (faults.DRIVER, faults.STOP, faults.SHARD_TRAVEL, ExpectedEnd.GOES_ON),
        (faults.DRIVER, faults.KILL, faults.FORWARD, ExpectedEnd.ALL_GONE),
        (faults.DRIVER, faults.STOP, faults.FORWARD, ExpectedEnd.GOES_ON),
    ],
)
def test_cell_has_its_expected_end(victim, fault, phase, end):
    wanted = expected(Cell(victim, fault, phase))
    assert wanted.end is end
    assert wanted.why


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (faults.STOP, (ReasonKind.FROZEN,)),
        (faults.GIL, (ReasonKind.IDLE, ReasonKind.BUSY)),
        (faults.DROP, (ReasonKind.CUT_OFF,)),
        (faults.KILL, ()),
    ],
)
def test_worker_that_does_not_exit_is_fenced_with_the_expected_reason(fault, reason):
    assert expected(Cell(faults.LAST, fault, faults.FORWARD)).fenced == reason


# ---- rules ---------------------------------------------------------------------------------------


def test_rules_of_every_cell_are_valid():
    for cell in POSSIBLE:
        rules = fault_rules(cell, MEMBERS, "h:3#1", "x", "/go")
        places = [rule.place for text in rules.rules for rule in parse(text)]
        several = cell.victim in (faults.TWO, faults.ALL_BUT_ONE)
        at_change = several and cell.phase == faults.CHANGE
        assert ("stop" if at_change else faults.PHASES[cell.phase]) in places


def test_victims_are_named_by_their_rank():
    assert asked(faults.ALL_BUT_ONE, faults.KILL, faults.FORWARD) == [
        "forward kill worker=h:0#1,h:1#1,h:2#1 step=9 victims=3 id=x"
    ]


def test_joiner_fault_is_preceded_by_a_kill_and_hits_any_new_worker():
    assert asked(faults.JOINER, faults.EXIT, faults.SNAPSHOT) == [
        "snapshot exit=7 other-than=h:0#1,h:1#1,h:2#1,h:3#1 victims=1 id=x",
        "forward kill worker=h:3#1 id=x-before",
    ]


def test_rendezvous_fault_is_preceded_by_a_closed_connection():
    assert asked(faults.LAST, faults.KILL, faults.RENDEZVOUS) == [
        "rendezvous kill worker=h:3#1 victims=1 id=x",
        "forward shut worker=h:1#1 id=x-before",
    ]


def test_checkpoint_is_read_by_new_workers_after_all_were_killed():
    assert asked(faults.RANK_0, faults.KILL, faults.RESUME) == [
        "durable-load kill other-than=h:0#1,h:1#1,h:2#1,h:3#1 victims=1 id=x",
        "forward kill step=9 victims=4 id=x-before",
    ]


def test_shard_transfer_faults_follow_the_loss_or_join_of_a_worker():
    rule, before = (parse(text)[0] for text in asked(faults.TWO, faults.KILL, faults.SHARD_TRAVEL))
    assert (rule.place, rule.victims) == ("shard-moved", 2)
    assert before.where == (("worker", (MEMBERS[1],)),)
    rule, before = (
        parse(text)[0] for text in asked(faults.JOINER, faults.KILL, faults.SHARD_PLACING)
    )
    assert rule.place == "shard-placed" and rule.where == (("other-than", tuple(MEMBERS)),)
    assert before.where == (("worker", (MEMBERS[-1],)),)


def test_joiner_is_hit_in_its_first_commit_of_a_world():
    for phase, hit in ((faults.SHARD_MIRROR, 2), (faults.SHARD_SEAL, 1)):
        (rule,) = parse(asked(faults.JOINER, faults.KILL, phase)[0])
        assert rule.hit == hit


def test_several_victims_of_a_sharded_commit_are_hit_in_the_same_commit():
    (rule,) = parse(asked(faults.TWO, faults.KILL, faults.SHARD_SEAL)[0])
    assert rule.victims == 2 and ("step", ("9",)) in rule.where


@pytest.mark.parametrize("phase", [*faults.COMMITS_SHARDS, *faults.MOVES_SHARDS])
def test_cells_with_phases_of_shards_run_in_sharded_jobs(phase):
    cell = Cell(faults.MIDDLE, faults.KILL, phase)
    assert expectations.kind_of(cell) is expectations.JobKind.SHARDED


def test_worker_leaves_while_all_members_hold():
    assert asked(faults.RANK_0, faults.KILL, faults.CHANGE) == [
        "hold kill worker=h:0#1 victims=1 id=x",
        "forward term worker=h:1#1 id=x-before",
    ]


def test_several_victims_of_a_change_are_hit_where_all_members_stop():
    """One victim may hold a check before the others, which wait for it in their next step: a deadlock."""
    assert asked(faults.ALL_BUT_ONE, faults.KILL, faults.CHANGE) == [
        "stop kill worker=h:0#1,h:1#1,h:2#1 victims=3 id=x",
        "forward term worker=h:3#1 id=x-before",
    ]


def test_victims_of_an_external_fault_wait_for_the_fault():
    assert asked(faults.DRIVER, faults.KILL, faults.STEP)[0].startswith("optimizer-step wait=/go")
    assert asked(faults.LAST, faults.DROP, faults.STEP)[0].startswith("optimizer-step wait=/go")


# ---- covering sets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("together", "at_most"), [(1, 35), pytest.param(2, 330, marks=pytest.mark.slow)]
)
def test_few_cells_cover_all_possible_combinations_of_values(together, at_most):
    def values(cells) -> set[tuple[str, ...]]:
        triples = ((cell.victim, cell.fault, cell.phase) for cell in cells)
        return {each for triple in triples for each in itertools.combinations(triple, together)}

    chosen = expectations.covering(POSSIBLE, together)
    assert values(chosen) == values(POSSIBLE)
    assert len(chosen) < at_most
    assert chosen == expectations.covering(reversed(POSSIBLE), together)


@pytest.mark.parametrize("together", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_jobs_contain_every_cell_once_in_a_possible_order(together):
    chosen = expectations.covering(POSSIBLE, together)
    jobs = batches(chosen)
    assert sorted(cell for job in jobs for cell in job) == sorted(chosen)
    for job in jobs:
        assert not any(is_first(cell) for cell in job[1:])
        assert not any(is_last(cell) for cell in job[:-1])
        assert len({shuts_connections(cell) for cell in job}) == 1
        assert len({expectations.kind_of(cell) for cell in job}) == 1


def test_workers_with_shared_memory_get_no_connection_faults():
    for cell in POSSIBLE:
        by_rule = any(
            " shut " in f"{rule} " for rule in fault_rules(cell, MEMBERS, "h:3#1", "x", "/go").rules
        )
        assert shuts_connections(cell) is by_rule, cell


# ---- selections ----------------------------------------------------------------------------------


def chosen_by(*words: str) -> list[Cell]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.choose(parser.parse_args(words))


def test_cells_are_chosen_by_axis():
    assert chosen_by("--only", "victim=last,fault=SIGSTOP, SIGCONT,phase=bucket") == [
        Cell("last", "SIGSTOP, SIGCONT", "bucket")
    ]
    assert len(chosen_by("--only", "victim=last,phase=bucket", "--skip", "fault=GIL held")) == 11
    sharded = chosen_by("--sharded", "--only", "victim=middle,fault=SIGKILL")
    assert {cell.phase for cell in sharded} == {*faults.COMMITS_SHARDS, *faults.MOVES_SHARDS}


@pytest.mark.parametrize("text", ["last", "who=last", "victim=nobody"])
def test_cells_that_do_not_exist_are_refused(text):
    with pytest.raises(Invalid, match=text.split("=")[-1]):
        chosen_by("--only", text)


# ---- facts from the journal ----------------------------------------------------------------------


def world(generation: int, *slots: int) -> dict:
    members = [{"worker": ["h", slot, 1]} for slot in slots]
    action = {"type": "PublishWorld", "generation": generation, "members": members}
    return {"at": 0.0, "event": {"type": "TimePassed"}, "actions": [action]}


def told(kind: str, slot: int, **fields) -> dict:
    return {"at": 0.0, "event": {"type": kind, "worker": ["h", slot, 1], **fields}, "actions": []}


def test_job_is_full_when_four_workers_train_and_commit():
    story = JournalFacts()
    story.update(world(2, 0, 1, 2, 3))
    for slot in range(4):
        story.update(told("WorkerResumed", slot, generation=2))
    was_full = [story.full]
    story.update(told("WorkerDigested", 0, commit=[2, 2]))
    was_full.append(story.full)
    story.update(told("WorkerExited", 1, code=-9))
    was_full.append(story.full)
    assert was_full == [False, True, False]


def test_newest_member_is_the_last_connected_member_of_the_world():
    story = JournalFacts()
    for slot in (1, 3, 0, 2):
        story.update(told("WorkerConnected", slot, pid=1))
    story.update(world(2, 0, 1, 3))
    assert story.newest == "h:0#1"


# ---- the page ------------------------------------------------------------------------------------


def test_page_shows_passed_failed_and_pending_cells():
    done = Cell(faults.LAST, faults.STOP, faults.FORWARD)
    failed = Cell(faults.LAST, faults.KILL, faults.FORWARD)
    text = page.page(
        {
            done: Result(done, True, 612.4, date="2026-11-21"),
            failed: Result(failed, False, said="4 exits, not 1", date="2026-11-25"),
        }
    )
    assert "1 on 2026-11-21, 1 on 2026-11-25" in text
    assert re.search(r"fenced\b.* 612\b", text)
    assert "- last | SIGKILL | forward: 4 " in text
    assert f" {len(POSSIBLE) - 2} not " in text


# ---- running -------------------------------------------------------------------------------------


def test_interrupted_run_closes_its_jobs_and_writes_no_results(monkeypatch, tmp_path):
    ended, here = threading.Event(), threading.get_ident()

    def start() -> None:
        signal.pthread_kill(here, signal.SIGINT)
        assert ended.wait(60)

    job = create_autospec(MatrixJob, instance=True)
    job.start.side_effect = start
    job.close.side_effect = ended.set
    monkeypatch.setattr(command, "MatrixJob", create_autospec(MatrixJob, return_value=job))
    cells = [cell for cell in POSSIBLE if not is_first(cell)][:1]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            command.run(command.Choice(cells, 1, tmp_path / "results"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
    assert not (tmp_path / "results").exists()
