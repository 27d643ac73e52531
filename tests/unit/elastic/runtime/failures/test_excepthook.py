"""A worker's exception is sent to its agent although PYTHONPATH had no effect."""

from __future__ import annotations

import os
import sys

import pytest

from elastic.errors import JobOver
from elastic.protocol.uncaught import sending
from elastic.runtime.failures import excepthook


@pytest.fixture
def sent(monkeypatch):
    found: list[BaseException] = []

    def send(error: BaseException, environ: object) -> bool:
        found.append(error)
        return True

    monkeypatch.setattr(sending, "send", send)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(sending.DIAGNOSTICS, "pipe")
    return found


def test_exception_is_sent_when_python_ran_no_sitecustomize(sent):
    excepthook.arrange()
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    sys.excepthook(JobOver, JobOver("over"), None)
    assert sent == [error]


def test_hook_of_the_script_stays(sent, monkeypatch):
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    excepthook.arrange()
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    assert shown == [error] and not sent


def test_process_that_is_no_worker_keeps_pythons_hook(sent, monkeypatch):
    monkeypatch.delenv(sending.DIAGNOSTICS)
    before = dict(os.environ)
    excepthook.arrange()
    sys.excepthook(JobOver, JobOver("over"), None)
    assert not sent and dict(os.environ) == before
