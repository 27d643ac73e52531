"""Whether it is the same job, and what time it is in it: what is asked before a driver goes on with another's job."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from elastic.driver.events import EndJob
from elastic.driver.journal.entries import Writer, encoded, header_of
from elastic.driver.journal.past import RecoveredJob
from elastic.driver.journal.resume import (
    check_same_job,
    clock_offset,
    differences,
    to_go_on_with,
    writer_here,
)
from elastic.driver.membership.membership import Membership
from elastic.driver.reasons import in_words
from elastic.driver.settings import UNBOUNDED, Settings
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


def test_the_same_job():
    assert differences(past(), COMMAND, settings()) == []
    check_same_job(past(), COMMAND, settings(env={"A": "another value, which nobody has kept"}))


def test_each_difference_is_named_as_the_user_knows_it():
    now = settings(
        workers_max=8, reset_limit=3, cooldown_max_s=30.0, idle_s=0.0, env={"B": "1"}, np=5
    )
    recorded("messages", differences(past(), ["python", "train.py", "--lr", "1"], now))
    unbounded = past(workers_max=UNBOUNDED)
    recorded("messages", differences(unbounded, COMMAND, settings()))


def test_it_is_refused_with_all_of_them_and_what_to_do():
    with raises(Invalid):
        check_same_job(past(), COMMAND, settings(workers_min=1, workers_max=8))


def test_no_setting_is_forgotten():
    """Each that differs is named: by its flag, or by its name. How many may start at once is the machine's."""
    other = {"elastic": False, "timeline": "/t", "reset_limit": 1, "host_attempts": 9}
    for name, value in vars(settings()).items():
        if name in ("np", "workers_min", "workers_max", "starting_max", "env"):
            continue
        changed = settings(**{name: other.get(name, value + 1 if value is not None else 1)})
        assert len(differences(past(), COMMAND, changed)) == 1, name


# ---- go on, or begin? -----------------------------------------------------------------------------------------------


def meant(found, command=COMMAND, *, resume=False, fresh=False):
    return to_go_on_with(found, command, settings(), resume=resume, fresh=fresh, name="job bert")


def ended(code=0) -> RecoveredJob:
    return dataclasses.replace(past(), ended=EndJob(code, in_words("because")))


def test_a_job_that_has_not_ended_is_gone_on_with_only_if_that_is_meant():
    unfinished = past()
    assert meant(unfinished, resume=True) is unfinished
    assert meant(unfinished, fresh=True) is meant(unfinished, resume=True, fresh=True) is None
    with raises(Invalid):
        meant(unfinished)
    with raises(Invalid):
        meant(unfinished, ["other"], resume=True)


def test_one_that_has_ended_is_told_again_to_who_meant_it_and_is_in_nobodys_way():
    assert meant(ended()) is None
    again = ended(3)
    assert meant(again, resume=True) is again
    with raises(Invalid):
        meant(again, ["other"], resume=True)
    assert meant(None, resume=True) is None


# ---- time ------------------------------------------------------------------------------------------------------------

FIRST = Writer(1, at=100.0, offset_s=0.0, unix_s=5000.0, boot="a")


def test_on_the_same_machine_its_clock_has_gone_on():
    gone_on = clock_offset(past(FIRST, last_at=150.0), 180.0, unix_s=9e9, boot="a")
    assert 180.0 + gone_on == 180.0
    second = Writer(2, at=1000.0, offset_s=850.0, unix_s=5080.0, boot="b")
    gone_on = clock_offset(past(second, last_at=1010.0), 200.0, unix_s=0.0, boot="b")
    assert 200.0 + gone_on == 1050.0


def test_on_another_machine_dates_tell():
    other = past(FIRST, last_at=150.0)  # at 5050 s
    assert 7.0 + clock_offset(other, 7.0, unix_s=5060.0, boot="b") == 160.0
    assert 7e6 + clock_offset(other, 7e6, unix_s=5060.0, boot="b") == 160.0
    assert 7.0 + clock_offset(other, 7.0, unix_s=5060.0, boot="") == 160.0


@pytest.mark.parametrize(("unix_s", "now"), [(0.0, 150.0), (9e9, 210.0)])
def test_dates_that_are_wrong_do_little_harm(unix_s, now):
    """Time does not go back, and no further than all cooldowns take."""
    assert 7.0 + clock_offset(past(FIRST, last_at=150.0), 7.0, unix_s=unix_s, boot="b") == now


def test_it_never_goes_back_even_where_clocks_are_mad():
    assert 20.0 + clock_offset(past(FIRST, last_at=150.0), 20.0, unix_s=0.0, boot="a") == 150.0


def test_this_process_as_the_next_writer():
    first = writer_here(term=3, address="h:1")
    assert (first.term, first.address, first.pid) == (3, "h:1", os.getpid())
    assert abs(first.unix_s - time.time()) < 60.0 and first.offset_s == 0.0 and first.boot
    next_one = writer_here(term=4, past=past(first, last_at=first.at + 0.5))
    assert next_one.at >= first.at + 0.5 and next_one.boot == first.boot
    elsewhere = Writer(1, at=1e9, unix_s=time.time(), boot="elsewhere")
    next_one = writer_here(past=past(elsewhere, last_at=1e9 + 1))
    assert 1e9 + 1 <= next_one.at < 1e9 + 61
    assert next_one.offset_s == pytest.approx(1e9, rel=0.1)


def test_a_header_has_no_value_of_the_environment():
    line = encoded(header_of(settings(env={"TOKEN": "hunter2"}), command=COMMAND))
    assert b"hunter2" not in line and b'"TOKEN":""' in line
