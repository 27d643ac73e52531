"""Contents of the live page: from events to patches of its state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic.chaos.simulator.simulator import Simulation
from elastic.driver import events
from elastic.driver.commandline.running_jobs.job_tables import status
from elastic.driver.monitoring.dashboard.page_model import LINES, PageModel
from elastic.driver.monitoring.dashboard.page_state import TAILS, applied
from elastic.driver.monitoring.dashboard.worker_grid import HELD_UP, STATES
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.output_interfaces import Usage
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Commit, Place, Times, Worker
from harness.golden import recorded
from harness.published import STORE, published, starts

A, B, C, D = (Worker("h", slot) for slot in range(4))
PLACE = Place(0, 4, 0, 4, 0, 1)


def model() -> PageModel:
    return PageModel(
        TimeSpent(JobView()), name="bert", command=["python", "train.py"], least=2, most=4
    )


def training(*workers: Worker) -> PageModel:
    page = model()
    page.view.note(events.HostsChanged({"h": 4}), starts(*workers), 10.0)
    for worker in workers:
        page.view.note(events.WorkerConnected(worker, 7 + worker.slot), [], 11.0)
    page.view.note(events.WorkerReady(workers[0], 0, None, STORE), [published(1, *workers)], 12.0)
    return page


def states(page: PageModel) -> dict[str, str]:
    return {key: row["state"] for key, row in page.worker_rows().items()}


def test_worker_joins_the_world():
    page = model()
    page.view.note(events.HostsChanged({"h": 1}), starts(A), 10.0)
    assert states(page) == {"h:0": "starting"}
    page.view.note(events.WorkerConnected(A, 4711), [], 11.0)
    assert states(page) == {"h:0": "joining"}
    page.view.note(events.WorkerReady(A, 0, None, STORE), [published(1, A)], 12.0)
    row = page.worker_rows()["h:0"]
    assert (row["state"], row["rank"], row["pid"], row["since"]) == ("training", 0, 4711, 12.0)
    assert page.state.values["job"]["phase"] == "training"
    assert list(page.state.series["world"]) == [[12.0, 1]]
    assert [each[1:3] for each in page.state.series["decisions"]] == [
        ["start", "h:0#1"],
        ["world", "generation 1: 1"],
    ]


def test_job_when_a_worker_has_not_entered_elastic_run_then_is_starting():
    page = model()
    page.view.note(events.HostsChanged({"h": 2}), starts(A, B), 10.0)
    for worker in (A, B):
        welcome = events.WelcomeWorker(worker, PLACE, False, True)
        page.view.note(events.WorkerConnected(worker, 7), [welcome], 11.0)
    outside = events.WorkerReady(A, 0, None, STORE, running=False)
    page.view.note(outside, [published(1, A, B)], 12.0)
    assert states(page) == {"h:0": "joining", "h:1": "joining"}
    assert page.state.values["job"]["phase"] == "starting"
    outside_lines = status(page.full(13.0))
    entered = events.WorkerReady(A, 1, None, STORE)
    page.view.note(entered, [], 14.0)  # in the constructor of DDP, B may still be lost
    assert states(page) == {"h:0": "joining", "h:1": "joining"}
    page.view.note(events.WorkerReady(B, 1, None, STORE), [published(2, A, B)], 15.0)
    assert states(page) == {"h:0": "training", "h:1": "training"}
    assert page.state.values["job"]["phase"] == "training"
    recorded("output", outside_lines[1])
    assert len(status(page.full(16.0))) == len(outside_lines) - 1


def test_slot_when_its_worker_computed_wrongly_then_is_shown_until_an_operator_releases_the_slot():
    page = training(A, B, C)
    facts: dict[str, Any] = {
        "step": 17,
        "shard": 5,
        "digest": "ff",
        "right": "fe",
        "witnesses": "h:0#1",
    }
    for quarantine, place in (("host", "h"), ("slot", "h:1")):
        wrong = because(ReasonKind.MISCOMPUTED, **facts, agreed=9, quarantine=quarantine)
        page.view.note(events.TimePassed(), [events.KillWorker(B, wrong)], 20.0)
        (shown,) = page.state.values["quarantined"]
        assert shown == {"place": place, "slot": "h:1", **facts, "agreed": 9}
    assert sum(f"{facts['right']} on {A}" in line for line in status(page.full(21.0))) == 1
    answer = events.AnswerRequest(1, True, because(ReasonKind.DRAINS_NO_MORE, host="h"))
    page.view.note(events.DrainRequested(1, "h", True), [answer], 22.0)
    assert not page.state.values["quarantined"]


def test_lost_worker_is_shown_until_another_takes_its_slot():
    page = training(A, B, C)
    broken = events.BreakWorld(1, [A, C], as_sentence("lost h:1#1"))
    page.view.note(events.WorkerExited(B, -9), [broken], 20.0)
    assert states(page) == {"h:0": "recovering", "h:1": "lost", "h:2": "recovering"}
    assert "signal 9 SIGKILL" in page.worker_rows()["h:1"]["note"]
    page.view.note(events.WorkerReady(C, 1, None, STORE), [published(2, A, C)], 20.05)
    assert states(page) == {"h:0": "training", "h:1": "lost", "h:2": "training"}
    assert [page.worker_rows()[key]["rank"] for key in ("h:0", "h:1", "h:2")] == [0, None, 1]
    again = Worker("h", 1, 2)
    page.view.note(events.TimePassed(), starts(again, reason=as_sentence("its slot is free")), 21.0)
    assert states(page)["h:1"] == "starting"
    page.view.note(events.WorkerExited(B, -9), [], 21.5)  # repeated exit of the previous worker
    assert states(page)["h:1"] == "starting"


@pytest.mark.parametrize(
    "event",
    [
        events.WorkerRaised(B, 1, None, "ValueError: bad sample", ""),
        events.WorkerQuit(B, 1, 3, "sys.exit(3)"),
    ],
)
def test_worker_whose_script_fails_is_lost_at_once_and_its_row_has_the_reason(event):
    page = training(A, B, C)
    for each in (event, events.WorkerExited(B, 3)):
        page.view.note(each, [], 20.0)
        row = page.worker_rows()["h:1"]
        assert row["state"] == "lost"
        recorded("page", row["note"])
    page = training(A, B)
    page.view.note(events.WorkerQuit(B, 1, 0, "sys.exit(0)"), [], 20.0)
    assert states(page)["h:1"] == "training"


def test_waiting_frozen_standby_and_leaving_states_are_shown():
    page = training(A, B, C)
    page.view.note(events.WorkerProgressed(A, 1, 7, "gradients", 1.5), [], 30.0)
    assert states(page)["h:0"] == "waiting"
    assert page.worker_rows()["h:0"]["since"] == 28.5
    page.view.note(events.WorkerProgressed(A, 1, 8), [], 31.0)
    page.view.note(events.WorkerFrozen(B, "stopped by a signal"), [], 31.0)
    page.view.note(events.TimePassed(), [events.TellStandby(C)], 31.0)
    assert states(page) == {"h:0": "training", "h:1": "frozen", "h:2": "standby"}
    page.view.note(events.WorkerThawed(B), [events.LetGo(B, as_sentence("SIGTERM"))], 32.0)
    assert states(page)["h:1"] == "leaving"
    page.view.note(events.WorkerExited(B, 0), [], 33.0)
    assert states(page)["h:1"] == "done"


def test_worker_that_its_host_no_longer_reports_is_lost():
    page = training(A, B)
    page.view.note(events.HostReported("h", [A], [A, B]), [], 20.0)
    assert states(page) == {"h:0": "training", "h:1": "lost"}
    recorded("page", page.worker_rows()["h:1"]["note"])


def test_released_worker_that_its_host_no_longer_reports_is_done():
    page = training(A, B, C)
    page.uses(B, Usage(cores=1.5), 15.0)
    page.view.note(events.WorkerProgressed(B, 1, 7, "gradients", 1.5), [], 16.0)
    page.view.note(events.TimePassed(), [events.LetGo(B, as_sentence("scaled down"))], 17.0)
    page.view.note(events.WorkerReturned(C, 1), [], 18.0)
    page.view.note(events.HostReported("h", [A], [A, B, C]), [], 20.0)
    assert states(page) == {"h:0": "training", "h:1": "done", "h:2": "done"}
    row = page.worker_rows()["h:1"]
    assert (row["since"], row["usage"]["cores"]) == (20.0, None)


def test_killed_worker_shows_its_reason_and_ignores_later_events():
    page = training(A, B)
    page.view.note(
        events.TimePassed(), [events.KillWorker(B, because(ReasonKind.FROZEN, how="stopped"))], 40.0
    )
    page.view.note(events.WorkerConnected(B, 9), [], 40.1)
    page.view.note(events.WorkerExited(B, -9), [], 40.2)
    row = page.worker_rows()["h:1"]
    assert row["state"] == "lost"
    recorded("page", row["note"])


def test_unlisted_slot_disappears_with_its_worker():
    page = training(A, B)
    page.patch(19.0)
    state = applied(None, page.full(19.0))
    page.view.note(
        events.HostsChanged({"h": 1}), [events.LetGo(B, as_sentence("left the list"))], 20.0
    )
    page.view.note(events.WorkerExited(B, 0), [published(2, A)], 21.0)
    assert states(page) == {"h:0": "training"}
    after = applied(state, page.patch(21.0))
    assert list(after["rows"]["workers"]) == ["h:0"]
    assert list(state["rows"]["workers"]) == ["h:0", "h:1"], "what was there is not changed"
    page.view.note(events.HostLost("h", "no answer"), [], 22.0)
    assert states(page) == {"h:0": "lost"} and page.state.tables["hosts"]["h"]["state"] == "lost"


def test_state_step_is_shown_beside_the_commit_with_its_rate():
    page = training(A, B)
    for steps, at in ((100, 20.0), (150, 25.0)):
        spent = events.WorkerSpent(
            A, 1, Times(), "training", Commit(1, steps), step=steps, steps=steps, batch=8
        )
        page.view.note(spent, [], at)
        page.view.note(events.WorkerSpent(B, 1, Times(), "training", steps=3, batch=8), [], at)
    values = page.state.values
    assert values["commit"]["number"] == 150 and values["commit"]["step"] == 150
    assert (values["steps"], values["samples"]) == (10.0, 160.0)
    page.view.note(events.WorkerPaced(A, 1, 10, 1.0, 30.0, 30, Commit(1, 160)), [], 26.0)
    assert "step" not in page.state.values["commit"]  # that of an older commit


def test_commits_are_shown_with_their_rate():
    page = training(A, B)
    spent = events.WorkerSpent(A, 1, Times(training=5.0), "training", Commit(1, 10))
    page.view.note(spent, [], 20.0)
    page.view.note(events.WorkerPaced(B, 1, 10, 1.0, 30.0, 30, Commit(1, 50)), [], 25.0)
    assert page.state.values["commit"] == {"generation": 1, "number": 50, "at": 25.0, "total": 50}
    assert list(page.state.series["speed"]) == [[25.0, 8.0]]
    page.view.note(events.CheckpointMade(Commit(1, 45)), [], 32.0)
    assert page.state.values["durable"] == {"generation": 1, "number": 45, "at": 32.0, "total": 1}


def test_currently_awaited_workers_are_shown():
    page = training(A, B, C, D)
    for worker in (A, B, C):
        page.view.note(events.WorkerProgressed(worker, 1, 7, "gradients", 1.0), [], 30.0)
    page.patch(40.0)
    assert page.state.values["held_up"] == [
        {"worker": "h:3", "rank": 3, "others": 3, "since": 29.0}
    ]


def test_worker_that_waits_less_than_its_peers_is_shown():
    page = training(A, B, C, D)
    for worker, waited_s in ((A, 20.0), (B, 3.0), (C, 19.0), (D, 21.0)):
        page.view.note(events.WorkerPaced(worker, 1, 10, waited_s, 30.0), [], 60.0)
    page.patch(70.0)
    [slow] = page.state.values["held_up"]
    assert (slow["rank"], slow["share"], slow["median"]) == (1, 0.1, 0.667)
    assert len(page.state.values["held_up"]) <= HELD_UP


def test_requested_stacks_are_kept_and_other_lines_are_not():
    page = training(A, B)
    page.stderr(A, "an ordinary line", 20.0)
    page.view.note(
        events.TimePassed(),
        [events.DumpStacks(A, because(ReasonKind.IDLE, for_s=30.0, where="in gradients"))],
        30.0,
    )
    assert page.expects_stack(A) and not page.expects_stack(B)
    page.stderr(A, 'File "train.py", line 3 in step', 30.1)
    page.stderr(A, "much later", 99.0)
    page.stderr(A, "and later", 99.0)
    [stack] = page.state.tables["stacks"].values()
    recorded("page", stack["why"])
    recorded("page", stack["text"])


def test_many_lines_are_truncated_with_a_note():
    page = model()
    for number in range(LINES + 50):
        page.line("stdout", "3", f"line {number}", 10.0)
    page.line("info", "", "x" * 1000, 11.5)
    lines = list(page.state.series["log"])
    assert len(lines) == LINES + 2
    recorded("page", lines[-2][3])
    assert lines[-1][3].endswith("...") and len(lines[-1][3]) < 600


def test_reported_numbers_are_taken_from_the_lowest_rank():
    page = training(A, B)
    page.report(1, {"loss": 0.5, "name": "x", "ok": True}, 20.0)
    page.report(0, {"loss": 0.4, "bad": float("nan")}, 21.5)
    page.report(1, {"loss": 0.3}, 22.0)
    table = page.state.tables["reported"]
    assert table["loss"] == {"rank": 0, "value": 0.4, "at": 21.5}
    assert table["bad"]["value"] is None and set(table) == {"loss", "bad"}
    assert list(page.state.series["metrics"]) == [[20.0, "loss", 0.5], [21.5, "loss", 0.4]]
    json.dumps(page.full(23.0), allow_nan=False)


def test_goodput_is_absent_before_the_first_world():
    page = model()
    page.view.note(events.HostsChanged({"h": 1}), starts(A), 10.0)
    page.view.note(events.WorkerConnected(A, 7), [], 15.0)
    assert page.patch(20.0)["set"]["goodput"]["ratio"] is None
    page.view.note(events.WorkerReady(A, 0, None, STORE), [published(1, A)], 20.0)
    assert page.patch(30.0)["set"]["goodput"]["ratio"] == pytest.approx(0.5)


def test_recovery_and_end_are_shown():
    page = training(A, B)
    report = events.ReportRecovery(
        2, "recovery", as_sentence("lost h:1#1"), 1, 83.0, {"formed": 20.0}, 0
    )
    page.view.note(events.TimePassed(), [report], 20.0)
    [row] = page.state.series["recoveries"]
    assert (row["total_ms"], row["phases_ms"], row["why"]) == (83.0, {"formed": 20.0}, "lost h:1#1")
    page.view.note(events.TimePassed(), [events.EndJob(1, as_sentence("too few"))], 21.0)
    page.view.note(events.WorkerReady(A, 1, None, STORE), [], 22.0)
    assert page.state.values["job"]["phase"] == "ended"
    recorded("page", page.state.values["job"]["ended"])


def test_operator_requests_are_shown():
    page = training(A, B)
    done, refused = (events.AnswerRequest(1, each, as_sentence("so")) for each in (True, False))
    page.view.note(events.ScaleRequested(1, 3), [done], 20.0)
    page.view.note(events.ScaleRequested(1, 1), [refused], 21.0)
    page.view.note(events.DrainRequested(1, "h"), [done], 22.0)
    assert page.state.values["job"]["most"] == 3
    assert page.state.tables["hosts"]["h"]["state"] == "drained"
    page.view.note(events.DrainRequested(1, "h", off=True), [done], 23.0)
    assert page.state.tables["hosts"]["h"]["state"] == "up"
    assert page.state.series["decisions"][-3][1:] == ["operator", "refused", "so"]


def test_state_of_the_previous_driver_is_shown():
    page = model()
    page.view.adopt({A: (11, 0), B: (12, None)}, 7, 50.0)
    assert states(page) == {"h:0": "training", "h:1": "joining"}
    assert page.state.values["job"]["generation"] == 7 and page.state.values["job"]["size"] == 1


def test_failover_when_no_worker_has_entered_elastic_run_then_the_job_starts():
    page = model()
    page.view.adopt({A: (11, 0), B: (12, 1)}, 1, 50.0, prepares=True)
    page.view.note(events.DriverRestarted(), [], 50.0)
    page.go_on(60.0)
    assert page.state.values["job"]["phase"] == "starting"
    assert page.spent.stretches()["training"] == 0.0
    page.view.note(events.WorkerReady(A, 1, None, STORE, running=True), [published(2, A, B)], 60.0)
    assert page.state.values["job"]["phase"] == "training"


def test_commit_of_the_next_world_is_shown_after_a_failover():
    page = model()
    page.view.adopt({A: (11, 0), B: (12, 1)}, 7, 50.0)
    before = page.state.values["commit"]
    assert before is None
    action = published(8, A, commit=Commit(7, 14))
    page.view.note(events.WorkerReady(A, 7, None, STORE), [action], 51.0)
    shown = page.state.values["commit"]
    assert shown is not None
    assert (shown["generation"], shown["number"], shown["at"]) == (7, 14, 51.0)


def test_member_that_is_about_to_exit_does_not_train_outside_the_world():
    page = training(A, B)
    gone = events.WorkerQuit(B, 1, 0, "sys.exit(0)")
    page.view.note(gone, [events.BreakWorld(1, [A, B], as_sentence("exits"))], 20.0)
    page.view.note(events.WorkerReady(A, 1, None, STORE), [published(2, A)], 20.5)
    row = page.worker_rows()["h:1"]
    assert (row["state"], row["rank"], row["since"]) == ("recovering", None, 20.0)


def test_killed_worker_of_a_slot_that_is_no_longer_listed_does_not_return():
    page = training(A, B)
    why = because(ReasonKind.FROZEN, how="stopped")
    page.view.note(events.WorkerFrozen(B, "stopped"), [events.KillWorker(B, why)], 20.0)
    left = events.LetGo(B, as_sentence("not listed"), fenced=True)
    page.view.note(events.HostsChanged({"h": 1}), [left], 21.0)
    assert states(page) == {"h:0": "training"}


def test_event_without_effect_makes_no_patch():
    page = training(A, B)
    page.patch(20.0)
    assert not page.changed
    patch = page.patch(20.1)
    assert patch == {"now": 20.1, "set": {}, "rows": {}, "add": {}}


@pytest.mark.parametrize("seed", [3, 11, 42])
def test_patches_lead_to_the_whole_state(seed):
    """Runs a job under faults. The state from all patches equals the state that a new viewer receives."""
    simulation = Simulation(seed, workers=4, faults=8)
    simulation.run()
    page = model()
    state = applied(None, page.full(0.0))
    for number, entry in enumerate(simulation.driver.entries):
        page.view.note(entry.event, entry.actions, entry.at)
        if number % 7 == seed % 7:
            state = applied(state, page.patch(entry.at))
    end = simulation.clock.now + 100.0
    state = applied(state, page.patch(end))
    whole = page.full(end)
    assert state == applied(None, whole)
    assert (
        len(page.state.series["decisions"]) > 10 and page.state.values["job"]["ended"] is not None
    )
    assert {row["state"] for row in whole["rows"]["workers"].values()} <= set(STATES)
    assert sum(page.state.values["goodput"]["workers"].values()) > 0
    assert all(len(items) <= TAILS[name] for name, items in state["add"].items())


# ---- step times ----------------------------------------------------------------------------------


def test_slowest_worker_has_the_most_own_work_per_step():
    page = training(A, B, C)
    for worker, waited_s in ((A, 20.0), (B, 2.0), (C, 18.0)):
        assert page.patch(20.0)["set"].get("slowest") is None
        page.view.note(events.WorkerPaced(worker, 1, 600, waited_s, 30.0, commits=300), [], 40.0)
    state = applied(None, page.full(50.0))
    rows = state["rows"]["workers"]
    assert [rows[f"h:{slot}"]["step_s"] for slot in range(3)] == [0.1, 0.1, 0.1]
    assert [rows[f"h:{slot}"]["own_s"] for slot in range(3)] == [0.0333, 0.0933, 0.04]
    rank = rows["h:1"]["rank"]
    assert state["set"]["slowest"] == {
        **{"worker": "h:1", "rank": rank, "own_s": 0.0933, "step_s": 0.1, "median_s": 0.04}
    }


def test_step_times_of_another_world_or_without_commits_are_hidden():
    page = training(A, B)
    for worker in (A, B):
        page.view.note(events.WorkerPaced(worker, 1, 600, 1.0, 30.0, commits=0), [], 40.0)
    assert page.full(50.0)["set"]["slowest"] is None
    for worker in (A, B):
        page.view.note(events.WorkerPaced(worker, 1, 600, 1.0, 30.0, commits=3), [], 70.0)
    assert page.full(80.0)["set"]["slowest"] is not None
    page.view.note(events.TimePassed(), [published(2, A, B, C)], 90.0)
    state = page.full(100.0)
    assert state["set"]["slowest"] is None
    assert all(row["own_s"] is None for row in state["rows"]["workers"].values())


def test_usage_of_a_worker_is_in_its_row_until_its_exit():
    page = training(A, B)
    used = Usage(1.5, 1 << 30, 0.5, 1 << 31)
    page.uses(B, used, 20.0)
    page.uses(Worker("h", 1, 9), Usage(9.0, 1), 20.0)  # of another process in its slot
    row = page.worker_rows()["h:1"]
    assert row["usage"] == {"cores": 1.5, "memory": 1 << 30, "gpu": 0.5, "gpu_memory": 1 << 31}
    page.view.note(events.WorkerExited(B, -9), [], 30.0)
    assert page.worker_rows()["h:1"]["usage"]["memory"] == 0


def test_status_when_only_the_initial_state_is_reported_then_no_commit_is_shown():
    page = training(A, B)
    page.view.note(events.WorkerReady(A, 1, Commit(1, 0), STORE), [], 20.0)
    page.patch(21.0)
    assert page.state.values["commit"]["initial"]
    recorded("page", status(page.full(30.0)))
    page.view.note(events.WorkerReady(A, 1, Commit(1, 3), STORE), [], 31.0)
    page.patch(32.0)
    assert "initial" not in page.state.values["commit"]


def test_status_when_figures_are_from_reports_then_each_group_of_one_age_has_its_age_once():
    page = training(A, B)
    for at, steps in ((20.0, 100), (30.0, 200)):
        spent = events.WorkerSpent(A, 1, Times(), "training", Commit(1, steps), steps, steps, 32)
        page.view.note(spent, [], at)
    page.report(0, {"loss": 0.5, "accuracy": 0.75}, 31.0)
    page.report(0, {"tokens": 7.0}, 10.0)
    page.patch(34.0)
    [progress] = [line for line in status(page.full(34.0)) if "steps/s" in line]
    assert [progress.count(f" {age} s ago") for age in ("4.0", "3.0", "24.0")] == [1, 1, 1]
    assert progress.count("ago") == 3
    recorded("page", progress)
    page.view.note(events.WorkerReady(A, 1, Commit(1, 203), STORE), [], 33.0)
    page.patch(34.5)
    [progress] = [line for line in status(page.full(35.0)) if "steps/s" in line]
    assert progress.count("ago") == 4, "the commit is newer than the rate"


def test_late_islands_when_a_merge_did_not_wait_then_are_shown_once_by_status_and_log():
    page = training(A, B)
    for merges in (7, 8):
        event = events.WorkerMerged(A, 1, merges, 100 * merges, 3, ["us"], 1.5, ["eu", "us"])
        page.view.note(event, [], 20.0)
    page.patch(21.0)
    assert page.state.values["merged"] == {
        "merges": 8,
        "position": 800,
        "islands": 3,
        "absent": ["us"],
        "waited_s": 3.0,
        "rows": [
            {"name": "eu", "late_merges": 0, "late": False},
            {"name": "us", "late_merges": 2, "late": True},
        ],
    }
    [line] = [each for each in page.state.series["log"] if each[1] == "warning"]
    recorded("page", line[3])
    recorded("page", status(page.full(22.0)))


def test_mistake_in_the_script_is_shown_by_status_and_log():
    page = training(A, B)
    page.view.note(events.WorkerFoundMistake(A, "no-commit", "no state.commit()"), [], 20.0)
    page.patch(21.0)
    assert page.state.values["mistakes"] == ["no state.commit()"]
    [line] = [each for each in page.state.series["log"] if each[1] == "warning"]
    recorded("page", line[3])
    recorded("page", status(page.full(22.0)))
