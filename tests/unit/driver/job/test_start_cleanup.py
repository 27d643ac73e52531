"""A rejected start leaves nothing behind: no record of a run, no folder, no journal."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline import cli
from elastic.driver.job.start import start
from elastic.driver.job.start_cleanup import StartCleanup
from elastic.errors import Invalid

PROGRAM = [sys.executable, "-c", ""]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder with the checkpoints of an earlier run."""
    monkeypatch.chdir(tmp_path)
    assert catalog.claim_run(Storage(str(tmp_path / "old"))) == 1
    (tmp_path / "file").touch()
    (tmp_path / "no_list").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "no_list").chmod(0o755)
    return tmp_path


def contents(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


def job_of(*flags: str):
    words = ["-np", "1", "--min-np", "1", *flags, *PROGRAM]
    return cli.make_job(cli.read_options(words, {}), {"PATH": os.environ["PATH"]})


@pytest.mark.parametrize("checkpoints", ["old", "new/below"])
@pytest.mark.parametrize(
    "flags",
    [
        ["--dashboard", "nonsense"],
        ["--report", "no/such/folder"],
        ["--output-filename", "file"],
        ["--preemption", "no-such-command"],
        ["--metrics-host", "h"],
        ["--from", "old@9"],
        ["--preload", "two words"],
        ["--journal", "no/such/folder"],
        ["--output-filename", "out", "--journal", "journal", "--dashboard", "nonsense"],
    ],
    ids=" ".join,
)
def test_rejected_flags_leave_no_file(folder, flags, checkpoints):
    before = contents(folder)
    with pytest.raises(Invalid):
        job_of("--checkpoint-dir", checkpoints, *flags)
    assert contents(folder) == before


@pytest.mark.parametrize("refusal", ["metrics", "dashboard", "discovery"])
async def test_job_rejected_at_its_start_leaves_no_file(folder, refusal):
    before = contents(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = {
            "metrics": ["--metrics-port", port],
            "dashboard": ["--dashboard", f":{port}"],
            "discovery": ["--host-discovery-script", "./no_list"],
        }[refusal]
        files = ["--checkpoint-dir", "old", "--output-filename", "out", "--journal", "journal"]
        job = job_of(*files, *flags)
        assert contents(folder) != before
        with pytest.raises(Invalid):
            await start(job)
    assert contents(folder) == before


async def test_job_on_a_missing_host_leaves_no_file(folder):
    before = contents(folder)
    job = job_of("--checkpoint-dir", "old", "-H", "no-such-host.invalid:1")
    assert contents(folder) != before
    assert (await start(job)).code
    assert contents(folder) == before


def test_run_and_journal_of_a_started_job_remain(tmp_path):
    storage, journal, traces = Storage(str(tmp_path)), tmp_path / "journal", StartCleanup()
    traces.file(str(journal))
    number = catalog.claim_run(storage)
    traces.run(storage, number)
    journal.write_text("header\nevent\n")
    (tmp_path / f"r{number:04}-g0002-c00000003").mkdir()
    before = contents(tmp_path)
    traces.remove()
    assert contents(tmp_path) == before


def test_existing_file_and_folder_remain(tmp_path):
    traces, journal = StartCleanup(), tmp_path / "journal"
    journal.touch()
    traces.file(str(journal))
    traces.folder(str(tmp_path / "made" / "below"))
    (tmp_path / "made" / "below").mkdir(parents=True)
    traces.remove()
    assert contents(tmp_path) == ["journal"]
