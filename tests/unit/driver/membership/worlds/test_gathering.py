"""Reminders about awaited workers: when the first is due, in each kind of gathering."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from elastic.driver.events import Action, EndJob, Report
from elastic.driver.membership.worlds.gathering import REMIND_S, START_REMIND_S, Gathering, Kind
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.settings import Settings
from harness.conversation import MembershipConversation, exited, hosts, said, the
from harness.golden import recorded


def gathering(kind: Kind) -> Gathering:
    return Gathering(
        kind,
        because(ReasonKind.FIRST_START),
        0.0,
        Settings(np=2, workers_min=1, workers_max=4, elastic=True),
    )


@pytest.mark.parametrize(
    ("kind", "after_s"),
    [(Kind.START, START_REMIND_S), (Kind.CHANGE, REMIND_S), (Kind.RECOVERY, REMIND_S)],
)
def test_a_start_is_given_more_time_than_a_step(kind, after_s):
    gathers = gathering(kind)
    assert gathers.remind_at == after_s
    gathers.remind_after_s *= 2
    gathers.begin_again(100.0)
    assert gathers.remind_at == 100.0 + after_s
    assert START_REMIND_S > REMIND_S


def test_a_snapshot_keeps_the_next_reminder():
    gathers = gathering(Kind.START)
    gathers.remind_after_s = 4 * START_REMIND_S
    taken = msgspec.to_builtins(gathers.kind), gathers.remind_after_s
    again = Gathering(
        Kind(taken[0]), gathers.reason, 0.0, gathers.settings, remind_after_s=taken[1]
    )
    assert again.remind_at == gathers.remind_at


def _facts(about: Reason) -> dict[str, Any]:
    return dict(about.facts)


def reminders(actions: list[Action]) -> list[tuple[str, int, int, int]]:
    return [
        (each.level, int(facts["late"]), int(facts["workers"]), round(facts["for_s"]))
        for each in actions
        if isinstance(each, Report) and each.about is not None
        for facts in [_facts(each.about)]
        if each.about.kind is ReasonKind.AWAITS_INIT
    ]


def test_script_that_never_calls_init_is_reported_after_the_start_and_less_often_then():
    talk = MembershipConversation(np=2)
    talk.tell(hosts(h=2))
    lines = talk.wait(250)
    info, warning = (
        [("info", 2, 2, 30), ("info", 2, 2, 60)],
        [("warning", 2, 2, 120), ("warning", 2, 2, 240)],
    )
    assert reminders(lines) == info + warning  # imports of large libraries take a minute
    for line in said(lines).splitlines()[::2]:
        recorded("log", line)


def test_worker_late_in_init_is_counted_apart_from_waiting_ones():
    talk = MembershipConversation(np=2, start_timeout_s=100)
    talk.tell(hosts(h=2))
    talk.connect("h:0")
    talk.ready("h:0", running=False)
    lines = talk.wait(50)
    assert reminders(lines) == [("warning", 1, 2, 30)]
    recorded("log", said(lines))


def test_job_of_a_fixed_size_may_run_a_program_without_init():
    talk = MembershipConversation(np=2, workers_min=2, elastic=False)
    talk.tell(hosts(h=2))
    assert reminders(talk.wait(250)) == []


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_elastic_job_without_init_fails_with_strict(strict, code):
    talk = MembershipConversation(np=2, strict=strict)
    talk.tell(hosts(h=2))
    end = the(EndJob, talk.tell(exited("h:0", 0), exited("h:1", 0)))
    kind = ReasonKind.NO_TRAINING if strict else ReasonKind.ALL_EXITED
    assert (end.code, end.reason.kind) == (code, kind)
