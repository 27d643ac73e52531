"""Detection of a command that has finished before: only if nothing changed that could affect its training."""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path

import pytest

from elastic.checkpoints import finished_training
from elastic.checkpoints.files import manifest
from elastic.checkpoints.files.manifest import CommitName, Manifest
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline import cli
from elastic.driver.commandline.options import flags
from elastic.driver.commandline.options.finished_job import (
    FINISHED,
    RerunReason,
    SameCommand,
    program_files,
)
from elastic.driver.commandline.options.starting_checkpoint import finished_before, same_command_of
from elastic.protocol import read_paths
from elastic.protocol.read_paths import ReadPaths

LAST = CommitName(3, 2, 100)
ENVIRON = {"PATH": "/bin", "EPOCHS": "3", "SHLVL": "1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with a script, its settings and a module that it imports.

    This process has thousands of modules, of other tests; a worker of this folder has this one and two others.
    """
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    (tmp_path / "library").mkdir()
    for path in ("run/train.py", "run/job.yaml", "library/layers.py"):
        (tmp_path / path).write_text("epochs: 3\n")
        os.utime(tmp_path / path, (1.0, 1.0))
    layers = types.ModuleType("layers_of_this_test")
    layers.__file__ = str(tmp_path / "library/layers.py")
    modules = [layers, os, finished_training]
    monkeypatch.setattr(finished_training, "loaded_modules", lambda: modules)
    monkeypatch.setattr(read_paths, "_observed", ReadPaths())
    monkeypatch.setattr(read_paths, "compiled", set)  # imported by other tests
    return tmp_path


def reads(path: Path) -> None:
    """Let a worker's script open a file or list a folder."""
    observed = read_paths.observed()
    assert observed is not None
    (observed.folders if path.is_dir() else observed.files).add(str(path))


def started(*more: str, environ: dict[str, str] = ENVIRON) -> SameCommand | None:
    words = ["-np", "2", "--checkpoint-dir", "ck", *more]
    return same_command_of(flags.parse([*words, "python", "train.py"]), environ)


def commit(name: CommitName) -> None:
    storage = Storage("ck")
    files = {"__0_0.distcp": storage.write(f"{name}/__0_0.distcp", b"bytes")}
    made = Manifest(manifest.FORMAT, name, 1, 0.0, "2", "", {}, {}, [], [], files, [])
    storage.write(f"{name}/{manifest.MANIFEST}", manifest.encoded(made))


def returned(name: CommitName, began_at: float | None = None) -> None:
    """Report the return of both ranks, each of which is this process."""
    began_at = time.time() if began_at is None else began_at
    for rank in range(2):
        finished_training.note_read(Storage("ck"), name, rank, began_at)
    finished_training.note_returned(Storage("ck"), name, began_at, 2)


def train(*more: str) -> bool:
    """Run a job from its start to exit code 0."""
    job = started(*more)
    assert job is not None and job.finished_before() is None
    commit(LAST)
    returned(LAST)
    return job.has_finished(LAST.run)


def again(*more: str, environ: dict[str, str] = ENVIRON) -> CommitName | None:
    words = ["-np", "2", "--checkpoint-dir", "ck", *more]
    options = flags.parse([*words, "python", "train.py"])
    job = same_command_of(options, environ)
    found = None if job is None else finished_before(job, options)
    return None if found is None else found.name


def test_same_command_has_finished(folder):
    (folder / "run/results.csv").write_text("what the job wrote")
    assert train()
    assert again() == LAST
    assert again(environ=ENVIRON | {"SHLVL": "2", "SSH_TTY": "/dev/pts/3"}) == LAST


def test_fresh_job_has_finished_for_the_command_without_that_flag():
    assert train("--fresh")
    assert again() == LAST
    assert again("--fresh") is None and again("--from", f"ck@{LAST}") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "run/train.py").write_text("epochs: 4\n"),
        lambda folder: (folder / "run/job.yaml").write_text("epochs: 4\n"),
        lambda folder: (folder / "run/more.yaml").write_text("epochs: 4\n"),
        lambda folder: (folder / "library/layers.py").write_text("layers: 4\n"),
        lambda folder: (folder / "library/layers.py").unlink(),
        lambda folder: commit(CommitName(4, 2, 0)),
        lambda folder: (folder / f"run/ck/{LAST}/__0_0.distcp").write_bytes(b"less"),
        lambda folder: (folder / "run/ck" / finished_training.RETURNED).unlink(),
        lambda folder: (folder / "run/ck" / FINISHED).write_text("{"),
    ],
)
def test_any_change_around_the_job_means_not_finished(folder, change):
    assert train()
    change(folder)
    assert again() is None


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "../data"],
        ["--data=../data"],
        ["--data", "train:../data,test:../data"],
        ["--data", "../data/*.bin"],
        ["-c", "python train.py --data ../data/a.bin"],
        ["--data", "linked"],
    ],
)
def test_changed_data_named_by_the_command_means_not_finished(folder, words):
    def job() -> SameCommand:
        command = ["-np", "2", "--checkpoint-dir", "ck", "python", "train.py", *words]
        found = same_command_of(flags.parse(command), ENVIRON)
        assert found is not None
        return found

    (folder / "data").mkdir()
    (folder / "data/a.bin").write_bytes(b"old")
    (folder / "run/linked").mkdir()
    (folder / "run/linked/data").symlink_to(folder / "data")
    (folder / "run/linked/data/again").symlink_to(folder / "run/linked")
    first = job()
    commit(LAST)
    returned(LAST)
    assert first.has_finished(LAST.run)
    assert job().finished_before() is not None
    (folder / "data/a.bin").write_bytes(b"changed")
    assert job().finished_before() is None


@pytest.mark.parametrize(("holds", "finished"), [("", True), ("data.bin", False)])
def test_file_added_to_a_named_folder_is_a_result_only_when_the_folder_was_empty(
    folder, holds, finished
):
    (folder / "named").mkdir()
    if holds:
        (folder / "named" / holds).write_bytes(b"data")
    command = ["-np", "2", "--checkpoint-dir", "ck", "python", "train.py", "../named"]
    job = same_command_of(flags.parse(command), ENVIRON)
    assert job is not None
    (folder / "named/more.bin").write_bytes(b"results, or more data")
    commit(LAST)
    returned(LAST)
    assert job.has_finished(LAST.run) is finished


def test_other_arguments_flags_environment_or_folders_are_another_job(folder, monkeypatch):
    assert train()
    assert again("-np", "3") is None
    assert again(environ=ENVIRON | {"EPOCHS": "4"}) is None
    options = flags.parse(["-np", "2", "--checkpoint-dir", "ck", "python", "train.py", "--lr", "1"])
    other = same_command_of(options, ENVIRON)
    assert other is not None and other.finished_before() is None
    monkeypatch.chdir(folder)
    assert again("--checkpoint-dir", "run/ck") is None


@pytest.mark.parametrize("path", ["run/train.py", "run/job.yaml", "library/layers.py"])
def test_change_during_training_means_not_finished(folder, path):
    job = started()
    assert job is not None
    began_at = time.time() - 0.1  # file system clocks are coarse
    (folder / path).write_text("epochs: 4\n")
    commit(LAST)
    returned(LAST, began_at)
    assert not job.has_finished(LAST.run)
    assert again() is None


def test_training_that_did_not_return_has_not_finished():
    job = started()
    assert job is not None
    commit(LAST)
    assert not job.has_finished(LAST.run)
    returned(CommitName(2, 2, 100))  # of an earlier run
    assert not job.has_finished(LAST.run)


@pytest.mark.parametrize(
    "more",
    [
        ["-H", "gpu1:2"],
        ["--host-discovery-script", "./hosts.sh"],
        ["--resume", "--journal", "job.journal"],
        ["--etcd", "e:1", "--job", "j"],
    ],
)
def test_job_that_may_run_elsewhere_is_unknown(more):
    assert started(*more) is None


def test_all_modules_of_the_process_are_signed(monkeypatch):
    monkeypatch.undo()
    found = finished_training.imported(time.time())
    assert found is not None
    assert {__file__, os.__file__, finished_training.__file__} <= found.keys()


def test_module_is_signed_by_time_only_if_its_file_without_links_is_installed(folder, monkeypatch):
    installed = folder / "prefix/site"
    installed.mkdir(parents=True)
    for path in (installed / "real.py", folder / "library/mine.py"):
        path.write_text("size: 4\n")
        os.utime(path, (1.0, 1.0))
    (installed / "linked.py").symlink_to(folder / "library/mine.py")
    (folder / "through").symlink_to(installed)
    monkeypatch.setattr(sys, "prefix", str(folder / "prefix"))
    paths = [installed / "real.py", installed / "linked.py", folder / "through/real.py"]
    modules = []
    for path in [*paths, folder / "library/mine.py"]:
        modules.append(types.ModuleType(path.stem))
        modules[-1].__file__ = str(path)
    monkeypatch.setattr(finished_training, "loaded_modules", lambda: modules)
    found = finished_training.imported(time.time())
    assert found is not None
    assert [found[str(path)].partition(":")[0] for path in paths] == ["time", "sha256", "time"]
    assert found[str(folder / "library/mine.py")].startswith("sha256:")


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_READ"])
def test_folder_with_too_many_files_means_not_finished(folder, monkeypatch, limit):
    assert program_files(["python"], str(folder), "") is not None
    monkeypatch.setattr(f"elastic.driver.commandline.options.finished_job.{limit}", 1)
    assert program_files(["python"], str(folder), "") is None
    assert not train()


def test_finished_command_exits_with_0_without_starting_a_worker(folder, capfd, monkeypatch):
    for name in [*os.environ]:
        monkeypatch.delenv(name) if name.startswith(("PYTEST", "ELASTIC", "HOROVOD")) else None
    (folder / "run/train.py").write_text("open('was-started', 'w')\n")
    os.utime(folder / "run/train.py", (1.0, 1.0))
    words = ["-np", "1", "--min-np", "1", "--checkpoint-dir", "ck", sys.executable, "train.py"]
    job = same_command_of(cli.read_options(words, os.environ), os.environ)
    assert job is not None
    commit(LAST)
    returned(LAST)
    assert job.has_finished(LAST.run)
    assert cli.main(words) == 0
    assert str(LAST) in capfd.readouterr().err
    assert not (folder / "run/was-started").exists()


@pytest.fixture
def data(folder: Path) -> Path:
    """A folder that no argument of the command names."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/a.csv").write_text("1")
    for path in ("elsewhere/a.csv", "elsewhere"):
        os.utime(folder / path, (1.0, 1.0))
    return folder / "elsewhere"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: (data / "a.csv").write_text("2"),
        lambda data: (data / "a.csv").unlink(),
        lambda data: (data / "b.csv").write_text("1"),
        lambda data: (data / "missing.csv").write_text("1"),
    ],
)
def test_changed_file_that_workers_read_means_not_finished(data, change):
    for path in (data, data / "a.csv", data / "missing.csv"):
        reads(path)
    assert train()
    assert again() == LAST
    change(data)
    assert again() is None


def test_data_changed_during_the_job_means_not_finished(data):
    reads(data / "a.csv")
    job = started()
    assert job is not None
    commit(LAST)
    returned(LAST, began_at=0.5)
    assert not job.has_finished(LAST.run)


@pytest.mark.parametrize("ranks", [0, 1])
def test_missing_read_list_of_a_rank_means_not_finished(ranks):
    job = started()
    assert job is not None
    commit(LAST)
    returned(LAST)
    for rank in range(ranks, 2):
        (Path("ck") / finished_training.READ.format(rank)).unlink()
    assert not job.has_finished(LAST.run)


def test_possibly_unobserved_read_means_not_finished(monkeypatch):
    observed = read_paths.observed()
    assert observed is not None
    observed.unseen.add("subprocess.Popen")
    assert not train()
    monkeypatch.setattr(read_paths, "_observed", None)
    assert not train()
    monkeypatch.setattr(read_paths, "_observed", ReadPaths())
    assert train()


@pytest.mark.parametrize(
    ("change", "environ", "reason"),
    [
        ("run/train.py", {}, RerunReason.FILES),
        ("library/layers.py", {}, RerunReason.READ),
        ("", {"EPOCHS": "4"}, RerunReason.COMMAND),
        (f"run/ck/{FINISHED}", {}, RerunReason.UNKNOWN),
    ],
)
def test_rerun_reason_when_a_file_or_variable_changed_then_identifies_the_change(
    folder, change, environ, reason
):
    assert train()
    if change:
        (folder / change).write_text("changed")
    job = started(environ=ENVIRON | environ)
    assert job is not None and job.finished_before() is None
    assert job.rerun_reason() is reason


def test_rerun_reason_when_no_job_has_finished_then_is_empty():
    job = started()
    assert job is not None and job.rerun_reason() is None
