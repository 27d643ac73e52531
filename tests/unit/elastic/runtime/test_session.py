"""Waits for the driver, and limits of a second training after a failure."""

from __future__ import annotations

import dataclasses
from unittest.mock import create_autospec

import pytest

from elastic.errors import CollectiveFailed, DriverLost, PeerLost
from elastic.rendezvous import worker_settings
from elastic.runtime import session as sessions
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.commit_log import CommitLog
from elastic.runtime.driver_connection import Link
from elastic.runtime.guarded_groups import Guard, GuardedGroups
from elastic.runtime.recovery import Phase
from elastic.runtime.session import Session
from elastic.runtime.training_reports import Training
from harness.golden import raises


class Hours:
    """A clock that advances by an hour with every read, and a condition that never waits."""

    def __init__(self, session: Session, looks: int) -> None:
        self.session, self.left, self.now = session, looks, 0.0

    def monotonic(self) -> float:
        self.now += 3600.0
        return self.now

    def wait(self, timeout: float) -> bool:
        self.left -= 1
        if not self.left:
            self.session.recovery.phase = Phase.TRAINING
        return True


@pytest.fixture
def waiting(monkeypatch):
    def made(looks: int) -> Session:
        env = dataclasses.replace(worker_settings.read({}), wait_timeout_s=7200.0)
        session = Session(env, None)
        session.recovery.phase = Phase.WAITING
        hours = Hours(session, looks)
        monkeypatch.setattr(sessions, "time", hours)
        monkeypatch.setattr(session.changed, "wait", hours.wait)
        return session

    return made


def test_a_driver_that_is_silent_for_too_long_is_lost(waiting):
    with raises(DriverLost):
        waiting(looks=50).wait_while(Phase.WAITING, "to form a world")


def test_a_standby_waits_without_limit_and_without_a_log_line(waiting, capfd):
    session = waiting(looks=50)
    session.recovery.stands_by = True
    session.wait_while(Phase.WAITING, "to form a world")
    assert session.recovery.phase is Phase.TRAINING
    assert capfd.readouterr().err == ""


def test_a_step_of_a_second_training_that_was_cut_short_is_not_committed():
    env = dataclasses.replace(worker_settings.read({}), elastic=True)
    session = Session(env, create_autospec(Link, instance=True))
    progress = ProgressCounter()
    groups, commits = GuardedGroups(session, progress), CommitLog(session, progress)
    session.recovery.phase = Phase.FINISHED
    with Training(session, progress).again():
        commits.may_commit()
        with pytest.raises(PeerLost), Guard(groups, "gradients"):
            raise CollectiveFailed("rank 1 is gone")
        with raises(PeerLost):  # though the script caught it
            commits.may_commit()
