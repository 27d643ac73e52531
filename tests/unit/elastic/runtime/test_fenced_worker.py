"""A worker that its driver has abandoned prints one sentence, with the reason if known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import elastic
from elastic.errors import JobFailed, JobOver, LeaveRequested
from elastic.protocol import messages
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle, link_thread, session
from elastic.runtime.failures import excepthook
from elastic.runtime.worker_runtime import WorkerRuntime
from harness.golden import raises, recorded


class Silent:
    """A link without incoming messages; outgoing ones are dropped."""

    def send(self, message: messages.Message) -> None:
        pass

    def poke(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch):
    """A list with the present time, which only the runtime sees."""
    now = [100.0]
    for module in (link_thread, session):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def worker(threads_of_its_own: None) -> Iterator[WorkerRuntime]:
    silent: Any = Silent()
    worker = WorkerRuntime(worker_settings.read({"HOROVOD_ELASTIC": "1"}), silent)
    yield worker
    worker.close()


def test_worker_that_was_stopped_before_the_loss_leaves_as_fenced(worker, clock):
    worker.training.enter()
    worker.link_thread.poked()
    clock[0] += 12.0  # stopped, and continued
    worker.link_thread.poked()
    worker.session.driver_lost("the driver closed the connection")
    assert worker.session.lost_driver
    with raises(LeaveRequested):
        worker.session.raise_over()


def test_worker_that_ran_continuously_leaves_without_a_known_reason(worker, clock):
    worker.training.enter()
    for _ in range(20):
        worker.link_thread.poked()
        clock[0] += 1.0
    worker.session.driver_lost("the driver closed the connection")
    with raises(LeaveRequested):
        worker.session.raise_over()


def test_stop_long_before_the_loss_is_not_taken_for_a_fence(worker, clock):
    worker.link_thread.poked()
    clock[0] += 12.0
    for _ in range(60):
        worker.link_thread.poked()
        clock[0] += 1.0
    worker.session.driver_lost("the driver closed the connection")
    with raises(JobFailed) as caught:
        worker.session.raise_over()
    assert not isinstance(caught.value, JobOver)  # no other process has reported it


def test_worker_that_received_the_end_of_the_job_ignores_a_later_driver_loss(worker):
    worker.link_thread.receive(messages.End("too few workers"))
    worker.session.driver_lost("the driver closed the connection")
    assert not worker.session.lost_driver
    with raises(JobOver):
        worker.session.raise_over()


def test_a_message_of_the_driver_ends_a_worker_without_a_traceback(monkeypatch):
    shown: list[BaseException] = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: shown.append(error))
    excepthook.arrange()
    once = sys.excepthook
    excepthook.arrange()
    assert sys.excepthook is once
    mistake = ValueError("a mistake in the script")
    sys.excepthook(JobOver, JobOver("Ctrl-C at the driver"), None)
    sys.excepthook(ValueError, mistake, None)
    assert shown == [mistake]


def test_reason_of_the_end_is_printed_when_elastic_run_exits(worker, monkeypatch, capsys):
    monkeypatch.setattr(lifecycle, "_runtime", worker)
    monkeypatch.setattr(lifecycle, "_initialized", True)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        raise AssertionError("it was fenced before")

    worker.session.driver_lost("the driver closed the connection")
    with pytest.raises(SystemExit) as end:
        train(elastic.ObjectState(step=0))
    assert end.value.code == 1
    recorded("output", capsys.readouterr().err)
