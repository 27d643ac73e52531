"""Errors of user code in a worker that is about to end, and the handling of SIGCHLD meanwhile."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from unittest.mock import create_autospec

import pytest

from elastic.protocol.messages import Address, CheckpointSoon, Commit, Place, World
from elastic.rendezvous import worker_settings
from elastic.runtime import errors_while_leaving
from elastic.runtime.driver_connection import Link
from elastic.runtime.errors_while_leaving import Departure
from elastic.runtime.recovery import Phase, Recovery, excuse_error
from elastic.runtime.session import Session

STORE = Address("127.0.0.1", 7000)


def training(recovery: Recovery) -> Recovery:
    recovery.enter()
    recovery.wait_for_world(STORE, "x")
    recovery.receive(World(2, Place(0, 2, 0, 2, 0, 1), STORE, 0, None, "because"))
    recovery.adopt()
    return recovery


def test_error_after_sigterm_is_excused_once():
    recovery = training(Recovery())
    assert not excuse_error(recovery)
    recovery.ask_to_leave("SIGTERM")
    assert excuse_error(recovery)
    assert not excuse_error(recovery)


def test_error_is_excused_once_when_a_last_checkpoint_of_this_world_is_requested():
    recovery = training(Recovery())
    recovery.receive(CheckpointSoon(1))
    assert not excuse_error(recovery)
    recovery.receive(CheckpointSoon(2))
    assert excuse_error(recovery)
    recovery.receive(CheckpointSoon(2))
    assert not excuse_error(recovery), "it is asked for again in each world"


def test_error_in_a_world_that_has_broken_is_excused():
    recovery = training(Recovery())
    recovery.ask_to_leave("SIGTERM")
    recovery.fail(2, "connection closed by peer")
    assert excuse_error(recovery)


@pytest.mark.parametrize("case", ["no commit", "outside", "over"])
def test_error_is_not_excused_when_no_world_could_follow(case):
    recovery = training(Recovery())
    recovery.ask_to_leave("SIGTERM")
    if case == "no commit":
        recovery.discard_commit()
    elif case == "outside":
        recovery.leave()
    else:
        recovery.driver_lost("gone")
    assert not excuse_error(recovery)


def session_of(*, elastic: bool) -> Session:
    link = create_autospec(Link, instance=True)
    found = Session(dataclasses.replace(worker_settings.read({}), elastic=elastic), link)
    training(found.recovery)
    return found


@pytest.fixture
def session():
    return session_of(elastic=True)


@pytest.fixture
def handler():
    """torch's raises for each loader worker that has died."""

    def raises(*_: object) -> None:
        raise RuntimeError("a loader worker died")

    before = signal.signal(signal.SIGCHLD, raises)
    yield raises
    signal.signal(signal.SIGCHLD, before)


def test_handler_of_sigchld_is_silent_from_an_excused_error_until_user_code_runs(session, handler):
    leaving = Departure(session)
    leaving.watch_children()
    session.recovery.ask_to_leave("SIGTERM")
    assert leaving.excuses_error()
    signal.raise_signal(signal.SIGCHLD)
    leaving.watch_children()
    assert signal.getsignal(signal.SIGCHLD) is handler
    with pytest.raises(RuntimeError):
        signal.raise_signal(signal.SIGCHLD)


def test_handler_of_sigchld_is_silent_between_two_worlds(session, handler):
    leaving = Departure(session)
    for _ in range(2):  # also where it is silent already
        leaving.ignore_children()
        signal.raise_signal(signal.SIGCHLD)
    leaving.watch_children()
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_handler_of_sigchld_is_silent_while_an_error_is_reported(session, handler):
    leaving = Departure(session)
    assert not leaving.excuses_error()
    signal.raise_signal(signal.SIGCHLD)
    leaving.watch_children()
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_sigterm_a_moment_after_a_child_has_died_is_waited_for(session, monkeypatch):
    """It died first, and was waited for by a loader that went out of scope."""
    leaving = Departure(session)
    leaving.watch_children()
    subprocess.run([sys.executable, "-c", ""], check=True)
    looks = later(monkeypatch, session, lambda: session.recovery.ask_to_leave("SIGTERM"))
    assert leaving.excuses_error()
    assert max(looks) <= errors_while_leaving.LOOK_S, (
        "a signal that another thread received ends no wait"
    )


def test_error_of_a_worker_without_children_is_raised_at_once(session, monkeypatch):
    monkeypatch.setattr(errors_while_leaving, "_has_children", lambda: False)
    monkeypatch.setattr(session.changed, "wait", lambda timeout: pytest.fail("it waits"))
    leaving = Departure(session)
    leaving.watch_children()
    assert not leaving.excuses_error()
    assert session.recovery.phase is Phase.TRAINING
    assert session.recovery.newest == Commit(2, 0)


@pytest.fixture
def fixed():
    """Of a job of a fixed size."""
    return session_of(elastic=False)


def later(monkeypatch, session, happens):
    """Return the lengths of the waits until the third check."""
    looks: list[float] = []

    def look(timeout: float) -> bool:
        looks.append(timeout)
        if len(looks) == 3:
            happens()
        return False

    monkeypatch.setattr(session.changed, "wait", look)
    return looks


def test_failed_collective_is_excused_when_a_last_checkpoint_is_requested_soon_after(
    fixed, monkeypatch
):
    later(monkeypatch, fixed, lambda: fixed.recovery.receive(CheckpointSoon(2)))
    assert Departure(fixed, waits=True).excuses_loss()


def test_failed_collective_is_not_excused_once_the_job_is_over(fixed, monkeypatch):
    later(monkeypatch, fixed, lambda: fixed.recovery.driver_lost("gone"))
    assert not Departure(fixed, waits=True).excuses_loss()


def test_failed_collective_is_raised_at_once_without_checkpoints(fixed, monkeypatch):
    monkeypatch.setattr(fixed.changed, "wait", lambda timeout: pytest.fail("it waits"))
    assert not Departure(fixed, waits=False).excuses_loss()


def test_failed_collective_of_an_elastic_job_is_raised_at_once(session, monkeypatch):
    monkeypatch.setattr(session.changed, "wait", lambda timeout: pytest.fail("it waits"))
    assert not Departure(session).excuses_loss()
