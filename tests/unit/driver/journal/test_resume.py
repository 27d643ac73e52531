"""Checks before a driver resumes another driver's job: the same job, and the time of its clock."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest

from elastic.driver.events import EndJob
from elastic.driver.journal.entries import Writer, encoded, header_of
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.resume import (
    check_same_job,
    clock_offset,
    differences,
    starts_over,
    to_go_on_with,
    writer_here,
)
from elastic.driver.membership.membership import Membership
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import UNBOUNDED, Settings, StartCheckpoint
from elastic.errors import Invalid
from harness.golden import raises, recorded

COMMAND = ["python", "train.py"]


def settings(**changes) -> Settings:
    fields = {"np": 4, "workers_min": 2, "workers_max": 4, "elastic": True, "env": {"A": "1"}}
    return Settings(**{**fields, **changes})


def past(writer: Writer | None = None, *, last_at: float = 0.0, **changes) -> RecoveredJob:
    found = settings(**changes)
    header = header_of(found, job="a1", command=COMMAND, folder="/home/me", writer=writer)
    return RecoveredJob(
        header=header,
        settings=header.checked(),
        writer=header.writer,
        membership=Membership(found),
        last_at=last_at,
        ended=None,
        replayed=0,
    )


def test_same_job_is_accepted():
    assert differences(past(), COMMAND, settings()) == []
    check_same_job(past(), COMMAND, settings(env={"A": "another value, which nobody has kept"}))


def test_each_difference_is_named_by_its_flag():
    now = settings(
        workers_max=8, reset_limit=3, cooldown_max_s=30.0, idle_s=0.0, env={"B": "1"}, np=5
    )
    recorded("messages", differences(past(), ["python", "train.py", "--lr", "1"], now))
    unbounded = past(workers_max=UNBOUNDED)
    recorded("messages", differences(unbounded, COMMAND, settings()))


def test_different_job_is_rejected_with_all_differences_and_a_remedy():
    with raises(Invalid):
        check_same_job(past(), COMMAND, settings(workers_min=1, workers_max=8))


def test_every_setting_is_compared():
    """Each difference is named by its flag or its name. The limit of concurrent starts depends on the machine."""
    other = {"elastic": False, "timeline": "/t", "reset_limit": 1, "host_attempts": 9}
    other |= {"health_check": "auto", "quarantine": "host", "straggler_factor": 0.25}
    other |= {"bandwidth_factor": 0.5}
    for name, value in vars(settings()).items():
        base: dict[str, Any] = {"standbys": 1} if name == "replace_stragglers" else {}
        if name in ("np", "workers_min", "workers_max", "starting_max", "env"):
            continue
        changed = settings(
            **base | {name: other[name] if name in other else 1 if value is None else value + 1}
        )
        assert len(differences(past(**base), COMMAND, changed)) == 1, name


# ---- resume or begin ------------------------------------------------------------------------------------------------


def meant(found, command=COMMAND, *, resume=False, fresh=False):
    return to_go_on_with(found, command, settings(), resume=resume, fresh=fresh, name="job bert")


def ended(code=0) -> RecoveredJob:
    return dataclasses.replace(past(), ended=EndJob(code, as_sentence("because")))


def test_unfinished_job_is_resumed_only_on_request():
    unfinished = past()
    assert meant(unfinished, resume=True) is unfinished
    assert meant(unfinished, fresh=True) is meant(unfinished, resume=True, fresh=True) is None
    with raises(Invalid):
        meant(unfinished)
    with raises(Invalid):
        meant(unfinished, ["other"], resume=True)


def test_ended_job_is_returned_on_request_and_otherwise_discarded():
    assert meant(ended()) is None
    again = ended(3)
    assert meant(again, resume=True) is again
    with raises(Invalid):
        meant(again, ["other"], resume=True)
    assert meant(None, resume=True) is None


# ---- time ------------------------------------------------------------------------------------------------------------

FIRST = Writer(1, at=100.0, offset_s=0.0, unix_s=5000.0, boot="a")


def test_clock_continues_on_the_same_machine():
    gone_on = clock_offset(past(FIRST, last_at=150.0), 180.0, unix_s=9e9, boot="a")
    assert 180.0 + gone_on == 180.0
    second = Writer(2, at=1000.0, offset_s=850.0, unix_s=5080.0, boot="b")
    gone_on = clock_offset(past(second, last_at=1010.0), 200.0, unix_s=0.0, boot="b")
    assert 200.0 + gone_on == 1050.0


def test_dates_determine_the_clock_on_another_machine():
    other = past(FIRST, last_at=150.0)  # at 5050 s
    assert 7.0 + clock_offset(other, 7.0, unix_s=5060.0, boot="b") == 160.0
    assert 7e6 + clock_offset(other, 7e6, unix_s=5060.0, boot="b") == 160.0
    assert 7.0 + clock_offset(other, 7.0, unix_s=5060.0, boot="") == 160.0


@pytest.mark.parametrize(("unix_s", "now"), [(0.0, 150.0), (9e9, 210.0)])
def test_wrong_dates_have_little_effect(unix_s, now):
    """Time does not go back, and advances by at most the longest cooldown."""
    assert 7.0 + clock_offset(past(FIRST, last_at=150.0), 7.0, unix_s=unix_s, boot="b") == now


def test_clock_is_monotonic_for_any_clock_readings():
    assert 20.0 + clock_offset(past(FIRST, last_at=150.0), 20.0, unix_s=0.0, boot="a") == 150.0


def test_this_process_is_the_next_writer():
    first = writer_here(term=3, address="h:1")
    assert (first.term, first.address, first.pid) == (3, "h:1", os.getpid())
    assert abs(first.unix_s - time.time()) < 60.0 and first.offset_s == 0.0 and first.boot
    next_one = writer_here(term=4, past=past(first, last_at=first.at + 0.5))
    assert next_one.at >= first.at + 0.5 and next_one.boot == first.boot
    elsewhere = Writer(1, at=1e9, unix_s=time.time(), boot="elsewhere")
    next_one = writer_here(past=past(elsewhere, last_at=1e9 + 1))
    assert 1e9 + 1 <= next_one.at < 1e9 + 61
    assert next_one.offset_s == pytest.approx(1e9, rel=0.1)


def test_header_contains_no_value_of_the_environment():
    line = encoded(header_of(settings(env={"TOKEN": "hunter2"}), command=COMMAND))
    assert b"hunter2" not in line and b'"TOKEN":""' in line


def test_job_when_restarted_without_a_checkpoint_then_a_log_line_reports_the_restart():
    begins = StartCheckpoint("g2c5", "/c")
    recorded("log", starts_over(past(), None))
    assert starts_over(past(), begins) is None
    assert starts_over(ended(), None) is None and starts_over(None, None) is None
