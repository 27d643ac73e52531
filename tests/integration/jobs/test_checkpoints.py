"""All workers are killed, and the driver too: training resumes from the storage."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import msgspec
import psutil
import pytest

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline.options.finished_job import FINISHED, FinishedJob
from harness import wording
from harness.history import SCRIPTS
from harness.job import Job, elasticrun
from harness.processes import clean_environment
from harness.program import stdout_of

pytestmark = pytest.mark.forked

TRAINING = ["python", str(SCRIPTS / "durable.py")]
FLAGS = "-np 2 --min-np 2 --checkpoint-every 10commits --checkpoint-dir"


def begun(output: str) -> list[int]:
    """The steps at which rank 0 began, or began again."""
    return [int(step) for step in re.findall(r"rank 0 begins at (\d+)", output)]


def workers(running: Job) -> list[psutil.Process]:
    """Of the last world."""
    members = running.worlds()[-1]["members"]
    return [psutil.Process(running.pid(rank)) for rank in range(len(members))]


def test_training_resumes_from_the_newest_checkpoint_when_all_workers_are_killed(job, tmp_path):
    folder = tmp_path / "checkpoints"
    training = job(f"{FLAGS} {folder}", TRAINING)
    training.until(lambda: len([*folder.glob("*/manifest.json")]) >= 2, "two checkpoints")
    for each in workers(training):
        os.kill(each.pid, signal.SIGKILL)
    training.wait_for(wording.TRAINING_GOES_FROM_NEWEST)
    training.wait_for(wording.ELASTIC_RESUMING_FROM)
    (folder / "enough").touch()
    assert training.wait(60) == 0
    first, second = begun(training.output)
    assert first == 0 and second >= 6
    assert "the same bits" in training.output
    assert "other bits" not in training.output
    # The last commit is durable too, wherever it was in the order of every tenth.
    [ended] = re.findall(r"rank 0 ends at (\d+)", training.output)
    storage = Storage(str(folder))
    last = catalog.read(storage, catalog.names(storage)[-1])
    assert last.values["step"] == int(ended)
    assert (wording.COMMIT_DURABLE % last.name.commit) in training.output, "an operator is told so"
    assert FINISHED not in os.listdir(folder), "nobody knows what the lost workers have read"


@pytest.mark.nightly
def test_same_command_trains_again_after_a_data_file_read_by_the_script_changed(tmp_path):
    """Not by `job`, which gives each job a separate folder and journal: the command would be another one."""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run.mkdir()
    for name, text in {"steps": "3", "rank0": "", "rank1": ""}.items():
        (data / f"{name}.txt").write_text(text)
        os.utime(data / f"{name}.txt", (1.0, 1.0))
    env = clean_environment() | {"FOLDER": str(data), "XDG_RUNTIME_DIR": str(run)}
    flags = ["-np", "2", "--min-np", "2", "--checkpoint-dir", "ck"]
    command = [elasticrun(), *flags, "python", str(SCRIPTS / "reads_data.py")]

    def ends() -> list[str]:
        told = stdout_of(*command, cwd=run, env=env, timeout=120)
        return re.findall(r"ends at (\d+)", told)

    assert ends() == ["3", "3"]
    found = msgspec.json.decode(Storage(str(run / "ck")).read(FINISHED), type=FinishedJob)
    assert {str(data / "steps.txt"), str(data / "rank1.txt")} <= found.read.keys()
    assert ends() == []  # nothing has changed, and no worker was started
    (data / "steps.txt").write_text("5")
    assert ends() == ["5", "5"]


def test_the_driver_is_killed_too_and_the_same_command_resumes(job, tmp_path):
    folder = tmp_path / "checkpoints"
    manual = FLAGS.replace("10commits", "manual")
    training = job(f"{manual} {folder}", TRAINING)
    training.wait_for(wording.COMMIT_DURABLE_2)  # the script has asked for it
    for each in [*workers(training), training.driver]:
        os.kill(each.pid, signal.SIGKILL)
    training.driver.wait()
    again = job(f"{FLAGS} {folder}", TRAINING)
    again.wait_for(wording.TRAINING_RESUMES)
    again.wait_for("the same bits")
    (folder / "enough").touch()
    assert again.wait(60) == 0
    assert begun(again.output)[0] >= 5
    a_checkpoint_of_another_script_ends_the_job_with_one_sentence(job, folder)


def every_process_gets_sigterm(training: Job, loaders_of_a_worker: int) -> None:
    """Loaders get it first, and the driver after each, as often as there are processes."""
    below = psutil.Process(training.driver.pid).children(recursive=True)
    loaders = [child for each in workers(training) for child in each.children()]
    assert len(loaders) >= 2 * loaders_of_a_worker
    for each in [*loaders, *(other for other in below if other not in loaders)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
        training.driver.send_signal(signal.SIGTERM)


def a_last_checkpoint_was_made(training: Job) -> None:
    assert training.wait(30) == 143
    [ended] = [
        record["event"]
        for record in training.records()
        if any(action["type"] == "EndJob" for action in record.get("actions") or [])
    ]
    assert ended["type"] == "CheckpointMade"
    last = training.worlds()[-1]
    assert len(last["members"]) == 2 and ended["commit"][0] == last["generation"]


@pytest.mark.parametrize("size", ["-np 2 --min-np 2", "-np 2"], ids=["elastic", "fixed"])
def test_every_process_gets_sigterm_and_a_last_checkpoint_is_made(job, tmp_path, size):
    """As from Slurm and systemd. Loader workers get it first, and user code raises because of them. A wrapper that is
    signalled too passes it on to the driver, which gets it twice.
    """
    folder = tmp_path / "checkpoints"
    flags = f"{size} --checkpoint-every 1h --checkpoint-dir {folder}"
    training = job(flags, TRAINING, env={"LOADERS": "2"})
    asked = "the two that the script asks for"
    training.until(lambda: len(training.events("CheckpointMade")) >= 2, asked)
    every_process_gets_sigterm(training, loaders_of_a_worker=2)
    a_last_checkpoint_was_made(training)
    assert training.worlds()[-1]["checkpoint"], "the loaders' ends raised on both ranks"


@pytest.mark.nightly
def test_sigterm_to_every_process_of_a_keras_job_with_loaders_makes_a_last_checkpoint(
    job, tmp_path
):
    folder = tmp_path / "checkpoints"
    flags = f"-np 2 --min-np 1 --checkpoint-every 1h --checkpoint-dir {folder}"
    training = job(flags, ["python", str(SCRIPTS / "keras_loaders.py")])
    for rank in range(2):
        training.wait_for(f"rank {rank} has committed", 120)
    every_process_gets_sigterm(training, loaders_of_a_worker=2)
    a_last_checkpoint_was_made(training)


@pytest.mark.nightly
def test_no_worker_starts_while_the_host_list_is_empty_and_returned_hosts_are_used(job, tmp_path):
    """No worker is started while there are no hosts, and returned ones are used immediately."""
    folder, listed = tmp_path / "checkpoints", tmp_path / "hosts"
    listed.write_text("localhost:2\n")
    script = ["--host-discovery-script", f"cat {listed}", "--checkpoint-dir", str(folder)]
    training = job(
        [*["-np", "2", "--min-np", "2", "--checkpoint-every", "10commits"], *script], TRAINING
    )
    training.until(lambda: training.events("CheckpointMade"), "a checkpoint")
    listed.write_text("")
    training.until(lambda: training.events("HostsChanged")[-1]["hosts"] == {}, "no hosts")
    for each in workers(training):
        os.kill(each.pid, signal.SIGKILL)
    training.until(lambda: len(training.events("WorkerExited")) == 2, "both are gone")
    before = len(training.actions("StartWorker"))
    listed.write_text("localhost:2\n")
    training.until(lambda: len(training.actions("StartWorker")) > before, "they are used again")
    (folder / "enough").touch()
    assert training.wait(60) == 0
    records = training.records()
    changed = [i for i, each in enumerate(records) if "hosts" in (each.get("event") or {})]
    during = records[changed[-2] : changed[-1]]
    assert records[changed[-2]]["event"]["hosts"] == {}
    assert not [
        a for each in during for a in each.get("actions") or [] if a["type"] == "StartWorker"
    ]


def test_checkpoint_path_that_is_a_file_is_refused_before_any_worker_starts(job, tmp_path):
    (tmp_path / "file").touch()
    refused = job(f"{FLAGS} {tmp_path / 'file'}", TRAINING)
    assert refused.wait(20) == 2
    assert wording.IS_A_FILE in refused.output
    assert "starting" not in refused.output


def test_bit_flip_in_one_replica_fences_that_worker_and_reaches_no_checkpoint(job, tmp_path):
    folder = tmp_path / "checkpoints"
    flags = FLAGS.replace("-np 2", "-np 3")
    training = job(f"{flags} {folder}", TRAINING, env={"FLIP": "1"})
    fenced = training.wait_for(wording.FENCING_LOCALHOST_UNDER_COMMIT)
    assert "model" in fenced[1]
    training.wait_for(wording.RECOVERED_WORKERS_GENERATION)
    (folder / "enough").touch()
    assert training.wait(60) == 0
    storage = Storage(str(folder))
    assert all(str(name.commit) != fenced[2] for name in catalog.names(storage))
    assert all(
        catalog.verify(storage, catalog.read(storage, n)) == "" for n in catalog.names(storage)
    )


def a_checkpoint_of_another_script_ends_the_job_with_one_sentence(job, folder):
    files = {path: path.read_bytes() for path in folder.rglob("*.distcp")}
    runs = {*folder.glob("run-*")}
    other = job(f"{FLAGS} {folder}", TRAINING, env={"WIDTH": "40"})
    assert other.wait(60) == 1
    assert wording.TRAINING_CANT_GO_FROM in other.output
    assert wording.START_OVER_FRESH in other.output
    assert "Traceback" not in other.output and wording.SLOT_MAY_RETURN not in other.output
    assert {path: path.read_bytes() for path in folder.rglob("*.distcp")} == files
    assert {*folder.glob("run-*")} == runs, "it has written nothing"


@pytest.mark.nightly
def test_old_and_new_members_write_one_checkpoint_under_another_driver(job, tmp_path):
    folder = tmp_path / "checkpoints"
    flags = f"-H localhost:1,127.0.0.2:1 {FLAGS} {folder} --resume"
    first = job(flags, TRAINING)
    first.wait_for(wording.COMMIT_DURABLE_2)
    first.unchecked = "its journal is gone on with"
    os.kill(first.driver.pid, signal.SIGKILL)
    first.driver.wait()
    second = Job(flags, TRAINING, folder=first.folder, forked=True)
    try:
        second.wait_for(wording.GOES_UNCHANGED_RECONNECTED)
        second.kill(rank=1)
        second.until(lambda: any(folder.glob("r0002-*/manifest.json")), "a checkpoint of both")
        (folder / "enough").touch()
        assert second.wait(60) == 0
    finally:
        left = second.end()
    assert not left
    storage = Storage(str(folder))
    last = catalog.read(storage, catalog.names(storage)[-1])
    assert (last.name.run, last.size) == (2, 2) and catalog.verify(storage, last) == ""
