"""The list of jobs: drivers that do not respond, and those that have ended."""

from __future__ import annotations

import json
import socket

import pytest

from elastic.driver.commandline.running_jobs import job_commands, job_tables
from elastic.driver.job.operator_api import client
from elastic.driver.job.operator_api.runtime_folder import JobRecord, PublishedRecord
from harness.golden import recorded


@pytest.fixture
def listening(monkeypatch):
    """Return the address of a stopped driver: the kernel accepts connections, and no answer follows."""
    monkeypatch.setattr(client, "CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_job_when_its_driver_is_stopped_then_is_listed_without_a_response(
    listening, tmp_path, capsys
):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    record = JobRecord("bert", 4711, listening, "00", ["train.py"], began=100.0)
    published = PublishedRecord(environ, record)
    assert job_commands.main("jobs", ["--json"], environ) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["pid"], row["phase"]) == ("bert", 4711, job_tables.NO_RESPONSE)
    assert row["size"] is None and row["stalled"] is None
    recorded("output", job_tables.jobs([row], now=160.0))
    published.close()
    assert job_commands.main("jobs", ["--json"], environ) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_job_when_ended_during_the_query_then_is_not_listed(
    listening, tmp_path, capsys, monkeypatch
):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    published = PublishedRecord(environ, JobRecord("bert", 4711, listening, "00"))

    class Ended(client.JobClient):
        def __init__(self, job: client.JobAddress) -> None:
            published.close()
            super().__init__(job)

    monkeypatch.setattr(job_commands, "JobClient", Ended)
    assert job_commands.main("jobs", ["--json"], environ) == 0
    assert json.loads(capsys.readouterr().out) == []
