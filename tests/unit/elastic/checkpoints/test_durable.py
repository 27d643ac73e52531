"""Reading the checkpoint to begin with, and waiting for the last one, is time that goes to the storage."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.checkpoints import durable, options
from elastic.monitoring.time_account import TimeAccount
from elastic.runtime.worker import Runtime
from elastic.state.state import ObjectState


@pytest.fixture
def rt():
    made = create_autospec(Runtime, instance=True)
    made.account = TimeAccount(0.0, "joining")
    made.alone = True
    return made


def test_reading_is_storage(rt, monkeypatch, tmp_path):
    during: list[str] = []
    monkeypatch.setenv(options.DIR, str(tmp_path))
    monkeypatch.setattr(durable, "_resume", lambda rt, *rest: during.append(rt.account.part))
    durable.resume(rt, ObjectState(step=0))
    assert (during, rt.account.part) == (["storage"], "joining")


def test_waiting_for_the_last_one_is_storage(rt):
    during: list[str] = []

    class Commits:
        durable: Any = object()

        def finish(self, state: Any) -> None:
            during.append(rt.account.part)

    rt.commits = Commits()
    durable.finish(rt, ObjectState(step=0))
    assert (during, rt.account.part) == (["storage"], "joining")
