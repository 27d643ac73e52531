"""How long a worker waits for the driver's word."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.errors import DriverLost
from elastic.rendezvous import environment
from elastic.runtime import session as sessions
from elastic.runtime.recovery import Phase
from elastic.runtime.session import Session


class Hours:
    """A clock on which every look is an hour after the one before, and a condition that waits for none."""

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
        env = dataclasses.replace(environment.read({}), wait_timeout_s=7200.0)
        session = Session(env, None)
        session.recovery.phase = Phase.WAITING
        hours = Hours(session, looks)
        monkeypatch.setattr(sessions, "time", hours)
        monkeypatch.setattr(session.changed, "wait", hours.wait)
        return session

    return made


def test_a_driver_that_says_nothing_for_too_long_is_lost(waiting):
    with pytest.raises(DriverLost, match="in vain for 7200 s: is elasticrun stopped"):
        waiting(looks=50).wait_while(Phase.WAITING, "to form a world")


def test_who_stands_by_waits_as_long_as_it_takes_and_says_nothing_of_it(waiting, capfd):
    session = waiting(looks=50)
    session.recovery.stands_by = True
    session.wait_while(Phase.WAITING, "to form a world")
    assert session.recovery.phase is Phase.TRAINING
    assert capfd.readouterr().err == ""
