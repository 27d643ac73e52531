"""Input and output of a job: Ctrl-C at its end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from typing import Any
from unittest.mock import create_autospec

import pytest

from elastic.driver.commandline import cli
from elastic.driver.events import CheckpointMade, EndJob, WorkerSpent
from elastic.driver.job.job_io import STOPPED_S, open_job_io
from elastic.driver.job.start import start
from elastic.driver.monitoring.explain import report_at_job_end
from elastic.driver.processes.worker_output import Output
from elastic.driver.reasons import as_sentence
from elastic.errors import Invalid
from elastic.protocol.messages import Commit, Times, Worker


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio lets it through before 3.11")
def test_ctrl_c_between_the_job_and_its_end_is_handled_at_the_end(monkeypatch):
    """Between the job's event loop and the wait for its output, asyncio handles the signal."""

    async def end() -> int:
        task: Any = asyncio.current_task()
        with open_job_io(job):
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 5
            while not task.cancelling() and time.monotonic() < deadline:
                pass
        return 0

    job = cli.make_job(cli.read_options(["-np", "1", "true"], {}), {})
    close = create_autospec(Output.close)
    monkeypatch.setattr(Output, "close", close)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(end())
    assert [call.args[1] for call in close.call_args_list] == [STOPPED_S]


def test_worker_that_raised_without_a_traceback_gets_no_empty_line(monkeypatch):
    job = cli.make_job(cli.read_options(["-np", "1", "true"], {}), {})

    async def log_of_job() -> list[str]:
        with open_job_io(job) as io:
            io.raised = {Worker("h", 0, 1): "", Worker("h", 1, 1): "trace"}
            lines: list[str] = []
            monkeypatch.setattr(io, "console", lambda _, text: lines.append(text))
            io.log_end(job)
            return lines

    assert asyncio.run(log_of_job()) == ["h:1#1: trace"]


@pytest.mark.parametrize(("code", "count"), [(0, 0), (1, 1), (130, 1), (None, 0)])
def test_job_when_not_successful_then_the_newest_checkpoint_is_logged(monkeypatch, code, count):
    job = cli.make_job(cli.read_options(["-np", "1", "true"], {}), {})
    reported = WorkerSpent(Worker("h", 0), 2, Times(), "training", Commit(2, 7))
    end = [] if code is None else [EndJob(code, as_sentence("why"))]

    async def log_of_job() -> list[str]:
        with open_job_io(job) as io:
            io.noted(reported, [], 1.0)
            io.noted(CheckpointMade(Commit(2, 5)), end, 2.0)
            lines: list[str] = []
            monkeypatch.setattr(io, "console", lambda _, text: lines.append(text))
            io.log_end(job)
            return lines

    lines = asyncio.run(log_of_job())
    assert [str(Commit(2, 5)) in line for line in lines] == [True] * count


def test_report_when_its_disk_is_full_then_the_job_succeeds_and_elasticrun_does_not(
    monkeypatch, tmp_path, capfd
):
    why = os.strerror(errno.ENOSPC)

    def full(*_: object) -> None:
        raise Invalid(why)

    monkeypatch.setattr(report_at_job_end, "write_page", full)
    command = ["--report", str(tmp_path / "r.html"), "-np", "1", "true"]
    assert cli.main(command) == 1
    job = cli.make_job(cli.read_options(command, {}), {**os.environ})
    outcome = asyncio.run(start(job))
    assert (outcome.code, outcome.unreported) == (0, True)
    assert why in capfd.readouterr().err
