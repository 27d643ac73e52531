"""Validation of checkpoint folders: one error before anything starts; no file is modified."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from elastic.checkpoints import catalog
from elastic.checkpoints import options as told
from elastic.checkpoints.files import manifest
from elastic.checkpoints.files.manifest import CommitName, Manifest
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline.offline import checkpoints_cli
from elastic.driver.commandline.options import flags
from elastic.driver.commandline.options.starting_checkpoint import CheckpointPlan, checkpoint_plan
from elastic.driver.settings import StartCheckpoint
from elastic.errors import Invalid
from harness.golden import raises, recorded
from harness.refusals import refusal_of

OLDER, NEWER = CommitName(1, 2, 30), CommitName(1, 2, 40)


def planned(folder: object, *more: str) -> CheckpointPlan:
    options = flags.parse(["-np", "1", "--checkpoint-dir", str(folder), *more, "true"])
    return checkpoint_plan(options, elastic=True)


def refused(folder: object, *more: str) -> str:
    """Return the error."""
    error = refusal_of(planned, folder, *more)
    assert "\n" not in error and str(folder) in error
    return error


def written(folder: Path, name: CommitName, **values: object) -> Path:
    """Write a commit of one file."""
    storage = Storage(str(folder))
    files = {"__0_0.distcp": storage.write(f"{name}/__0_0.distcp", b"bytes")}
    made = Manifest(manifest.FORMAT, name, 1, 0.0, "2", "", values, {}, [], [], files, [])
    storage.write(f"{name}/{manifest.MANIFEST}", manifest.encoded(made))
    return folder / str(name)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def living(storage: Storage, number: int) -> Iterator[int]:
    """Simulate another process of this machine that owns the run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        began_at = psutil.Process(other.pid).create_time()
        whose = catalog.RunOwner(os.uname().nodename, other.pid, began_at)
        assert storage.claim(f"run-{number:04}", msgspec.json.encode(whose))
        yield other.pid


def test_unusable_folders_are_rejected(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/checkpoints"):
        recorded("messages", refused(folder))
    recorded("messages", refused("s3:/bucket/bert"))
    recorded("messages", refused("gs://bucket/bert"))
    recorded("messages", refused("memory://bert"))


def test_full_disk_is_reported(tmp_path, monkeypatch):
    """An empty file can be created, but its first byte cannot be synced to disk."""
    real = os.fsync

    def fsync(number: int) -> None:
        if os.fstat(number).st_size:
            _no_space()
        real(number)

    monkeypatch.setattr("elastic.checkpoints.files.storage.os.fsync", fsync)
    recorded("messages", refused(tmp_path))
    assert content(tmp_path) == {}


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_checkpoint_of_a_newer_version_is_refused_instead_of_an_older_one_being_used(tmp_path):
    written(tmp_path, OLDER)
    path = written(tmp_path, NEWER) / manifest.MANIFEST
    now = b'"format":%d' % manifest.FORMAT
    path.write_bytes(path.read_bytes().replace(now, b'"format":9', 1))
    before = content(tmp_path)
    recorded("messages", refused(tmp_path))
    assert content(tmp_path) == before
    assert planned(tmp_path, "--fresh").env["ELASTIC_CHECKPOINT_FLOOR"] == "2"


def test_checkpoint_with_a_missing_share_is_skipped_and_refused_when_no_other_exists(tmp_path):
    written(tmp_path, OLDER)
    (written(tmp_path, NEWER) / "__0_0.distcp").unlink()
    level, line = planned(tmp_path).notes[0]
    assert level == "warning"
    recorded("messages", line, NEWER)
    (tmp_path / str(OLDER) / "__0_0.distcp").unlink()
    recorded("messages", refused(tmp_path))


def test_second_job_on_a_folder_is_rejected(tmp_path):
    storage = Storage(str(tmp_path))
    with living(storage, 1) as pid:
        storage.claim("run-0002", msgspec.json.encode(catalog.RunOwner("elsewhere", 1, 0.0)))
        before = content(tmp_path)
        recorded("messages", refused(tmp_path), pid)
        assert content(tmp_path) == before


def test_later_of_two_simultaneous_jobs_gives_way(tmp_path, monkeypatch):
    storage, claim_run = Storage(str(tmp_path)), catalog.claim_run
    with contextlib.ExitStack() as stack:

        def another_was_faster(ours: Storage) -> int:
            stack.enter_context(living(storage, 1))
            return claim_run(ours)

        monkeypatch.setattr(catalog, "claim_run", another_was_faster)
        recorded("messages", refused(tmp_path))
        assert [*storage.sizes()] == ["run-0001"]


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_path_is_not_the_working_directory(empty: str) -> None:
    recorded("messages", refused(empty))


def test_two_runs_with_a_commit_of_the_same_name(tmp_path: Path) -> None:
    for run in (1, 2):
        written(tmp_path, CommitName(run, 2, 20))
    with raises(Invalid):
        planned(tmp_path / "new", "--from", f"{tmp_path}@2.20")
    one = ("--from", f"{tmp_path}@r0001-g0002-c00000020")
    planned(tmp_path / "new", *one)
    recorded("messages", refused(tmp_path, *one, "--fresh"))


@pytest.mark.parametrize("which", ["g2c20", "2.20", "r0001-g0002-c00000020"])
def test_commit_is_selected_by_its_id_in_any_format(tmp_path: Path, which: str):
    for name in (CommitName(1, 2, 20), CommitName(1, 2, 2)):
        written(tmp_path, name)
    plan = planned(tmp_path / "new", "--from", f"{tmp_path}@{which}")
    assert plan.env[told.FROM] == f"{tmp_path}@{CommitName(1, 2, 20)}"


def test_missing_folder_is_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises(Invalid):
        checkpoints_cli.main(["--verify", str(tmp_path / "mistyped")])
    assert checkpoints_cli.main([str(tmp_path)]) == 0
    assert checkpoints_cli.main(["--verify", str(tmp_path)]) == 1
    recorded("output", capsys.readouterr().out)


def test_checkpoint_removed_during_verification_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older, reading = written(tmp_path, OLDER), Storage.reading
    written(tmp_path, NEWER)

    def removed_first(storage: Storage, file: str) -> Any:
        shutil.rmtree(older, ignore_errors=True)
        return reading(storage, file)

    monkeypatch.setattr(Storage, "reading", removed_first)
    assert checkpoints_cli.main(["--verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("verified") == 1


def test_folder_in_use_by_a_job_is_not_pruned(tmp_path: Path) -> None:
    for name in (OLDER, NEWER):
        written(tmp_path, name)
    with living(Storage(str(tmp_path)), 1) as pid:
        before = content(tmp_path)
        with raises(Invalid, pid):
            checkpoints_cli.main(["--prune", "1", str(tmp_path)])
        assert content(tmp_path) == before


def test_checkpoint_from_which_a_job_begins_is_a_value_of_its_plan(tmp_path):
    assert planned(tmp_path / "new").begins is None
    written(tmp_path, OLDER, step=300)
    begins = StartCheckpoint(str(OLDER), str(tmp_path), 300)
    assert planned(tmp_path).begins == begins
    assert planned(tmp_path, "--fresh").begins is None
    other = planned(tmp_path / "other", "--from", f"{tmp_path}@{OLDER}")
    assert other.begins == begins
