"""Checkpoints of sharded models and optimizers in real jobs: any number of workers resumes from them, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline.offline import checkpoints_cli
from elastic.driver.reasons import ReasonKind
from harness.history import SCRIPTS
from harness.sharded_jobs import GONE, IMPORTS

sys.path.append(str(SCRIPTS))
fsdp = pytest.importorskip("fsdp")
zero = pytest.importorskip("zero")
fsdp_durable = pytest.importorskip("fsdp_durable")

pytestmark = pytest.mark.forked(*IMPORTS)
TRAINING = ["python", str(SCRIPTS / "fsdp_durable.py")]
APART = {"ELASTIC_NATIVE": "0"}  # no memory of a worker outlives it, as on different hosts


def begins(training: Any) -> list[dict[str, Any]]:
    """Return the records of rank 0 in each world, oldest first."""
    file = training.folder / "begins.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def started(job: Any, folder: Path, size: int, steps: int, flags: str = "", **env: str) -> Any:
    return job(
        f"-np {size} --min-np 1 {flags or '--checkpoint-every 3commits'} --checkpoint-dir {folder}",
        TRAINING,
        env={"STEPS": str(steps)} | env,
    )


def trained(
    job: Any, folder: Path, size: int, steps: int, flags: str = "", **env: str
) -> list[dict[str, Any]]:
    training = started(job, folder, size, steps, flags, **env)
    training.succeed(150)
    return begins(training)


def goes_back_where_shards_are_lost(job: Any, tmp_path: Path, **env: str) -> None:
    """Two of four workers die at once, each the only holder of a shard of the other."""
    rules = tmp_path / "rules"
    rules.write_text("optimizer kill slot=1,2 step=10 victims=2")
    training = started(
        job,
        tmp_path / "all",
        4,
        16,
        f"--checkpoint-every 3commits {GONE}",
        ELASTIC_FAILPOINTS=f"@{rules}",
        SLOW="0.2",
        **APART,
        **env,
    )
    training.succeed(200)
    first, second = begins(training)
    assert (first["step"], first["size"]) == (0, 4)
    assert 0 < second["step"] < 10 and second["step"] % 3 == 0
    assert second["size"] == 2 and second["same"]
    assert second["pid"] == first["pid"]
    assert len(training.events("WorkerConnected")) == 4, "no worker was started anew"
    assert training.actions("ReportRecovery")[-1].get("from_checkpoint")


@pytest.mark.timeout(300)
def test_checkpoint_of_three_workers_resumes_on_two_and_exports_to_a_plain_model(
    job: Any, tmp_path: Path
):
    folder = tmp_path / "all"
    assert trained(job, folder, 3, 4)[0]["step"] == 0
    assert checkpoints_cli.main(["--verify", str(folder)]) == 0
    storage = Storage(str(folder))
    [last] = catalog.names(storage)[-1:]
    found = catalog.read(storage, last)
    assert found.sharded and found.size == 3 and found.step == 4
    (second,) = trained(job, folder, 2, 6)
    assert (second["step"], second["size"], second["same"]) == (4, 2, True)
    file = tmp_path / "all.pt"
    assert checkpoints_cli.main(["export", str(folder), "--out", str(file)]) == 0
    exported, plain = torch.load(file), fsdp.Training("plain", sharded=False)
    plain.model.load_state_dict(exported["model"])
    plain.optimizers[0].load_state_dict(exported["optimizer0"])
    assert exported["step"] == 6
    assert fsdp_durable.digest(plain) == exported["seen"], "the bits of the last commit"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["torch", pytest.param("ours", marks=pytest.mark.nightly)])
def test_partitioned_entries_resume_with_another_world_size_and_load_into_a_plain_optimizer(
    job: Any, tmp_path: Path, how: str
):
    folder = tmp_path / "all"
    assert trained(job, folder, 3, 4, ZERO=how)[0]["step"] == 0
    (second,) = trained(job, folder, 2, 6, ZERO=how)
    assert (second["step"], second["size"], second["same"]) == (4, 2, True)
    file = tmp_path / "all.pt"
    assert checkpoints_cli.main(["export", str(folder), "--out", str(file)]) == 0
    exported, plain = torch.load(file), zero.Training("plain")
    plain.model.load_state_dict(exported["model"])
    plain.optimizers[0].load_state_dict(exported["optimizer0"])
    assert exported["step"] == 6
    assert fsdp_durable.digest(plain) == exported["seen"], "the bits of the last commit"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "feature"),
    [*(("torch", each) for each in zero.FEATURES), *(("ours", each) for each in zero.OF_OURS)],
)
def test_any_number_of_workers_resumes_from_partitioned_entries(
    job: Any, tmp_path: Path, how: str, feature: str
):
    before = 0
    for size, steps in ((4, 4), (2, 6), (3, 8), (1, 10), (4, 12)):
        (found,) = trained(job, tmp_path / "all", size, steps, FEATURE=feature, ZERO=how)
        assert (found["step"], found["size"], found["same"]) == (before, size, True)
        before = steps


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["torch", "ours"])
def test_survivors_resume_from_a_checkpoint_when_entries_are_lost(
    job: Any, tmp_path: Path, how: str
):
    goes_back_where_shards_are_lost(job, tmp_path, ZERO=how)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "feature", ["plain", "sgd", "bf16", "tied", "frozen", "ignored", "two_optimizers", "one_unit"]
)
def test_any_number_of_workers_resumes_bit_for_bit(job: Any, tmp_path: Path, feature: str):
    before = 0
    for size, steps in ((4, 4), (2, 6), (3, 8), (1, 10), (4, 12)):
        (found,) = trained(job, tmp_path / "all", size, steps, FEATURE=feature)
        assert (found["step"], found["size"], found["same"]) == (before, size, True)
        before = steps


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_replicas_write_each_row_once_and_any_number_of_workers_resumes(job: Any, tmp_path: Path):
    folder, flags, before = tmp_path / "all", "--min-np 2 --checkpoint-every 3commits", 0
    for size, steps in ((4, 4), (3, 6), (2, 8), (4, 10)):
        (found,) = trained(job, folder, size, steps, flags, LEAST="2")
        assert (found["step"], found["size"], found["same"]) == (before, size, True)
        before = steps
    assert checkpoints_cli.main(["--verify", str(folder)]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_survivors_resume_from_a_checkpoint_in_their_processes_when_shards_are_lost(
    job: Any, tmp_path: Path
):
    goes_back_where_shards_are_lost(job, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_shards_lost_before_the_first_checkpoint_end_the_job(job: Any, tmp_path: Path):
    rules = tmp_path / "rules"
    rules.write_text("optimizer kill slot=1,2 step=5 victims=2")
    training = started(
        job, tmp_path / "all", 4, 9, f"--checkpoint-every 1h {GONE}", ELASTIC_FAILPOINTS=f"@{rules}", **APART
    )  # fmt: skip
    assert training.wait(120) != 0
    (end,) = training.actions("EndJob")
    assert end["reason"]["kind"] == ReasonKind.SHARDS_LOST.value


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_new_workers_resume_from_the_newest_checkpoint_when_all_are_killed(
    job: Any, tmp_path: Path
):
    folder = tmp_path / "all"
    training = started(job, folder, 3, 60, SLOW="0.1")
    training.until(lambda: len([*folder.glob("*/manifest.json")]) >= 2, "two checkpoints", 90)
    for rank in range(3):
        training.kill(rank)
    training.succeed(200)
    found = begins(training)
    assert found[0]["step"] == 0 and found[1]["step"] >= 3
    assert all(each["same"] for each in found)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_sigterm_makes_a_last_checkpoint(job: Any, tmp_path: Path):
    folder = tmp_path / "all"
    training = started(job, folder, 3, 10**6, "--checkpoint-every manual", SLOW="0.05")
    training.until(lambda: begins(training), "training", 90)
    training.driver.send_signal(signal.SIGTERM)
    assert training.wait(60) == 143
    step = catalog.read(Storage(str(folder)), catalog.names(Storage(str(folder)))[-1]).step
    assert step is not None
    (found,) = trained(job, folder, 2, step + 2)
    assert (found["step"], found["same"]) == (step, True)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_corrupted_rows_found_by_one_rank_make_all_ranks_resume_from_the_previous_checkpoint(
    job: Any, tmp_path: Path
):
    folder = tmp_path / "all"
    trained(job, folder, 2, 9, SLOW="0.2")
    storage = Storage(str(folder))
    before, last = catalog.names(storage)[-2:]
    tensor = next(
        each
        for each in catalog.read(storage, last).tensors
        if each.rows is not None and each.file == "__1_2.distcp"
    )
    assert tensor.rows is not None
    with (folder / str(last) / tensor.file).open("r+b") as file:
        file.seek(tensor.rows.data)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    (found,) = trained(job, folder, 3, 12)
    assert found["step"] == catalog.read(storage, before).step
    assert found["same"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("wrote", "reads"), [("plain", "sgd"), ("plain", "tied")])
def test_checkpoint_of_another_model_or_optimizer_is_refused_and_not_modified(
    job: Any, tmp_path: Path, wrote: str, reads: str
):
    folder = tmp_path / "all"
    trained(job, folder, 2, 4, FEATURE=wrote)
    names = catalog.names(Storage(str(folder)))
    training = started(job, folder, 3, 6, FEATURE=reads)
    assert training.wait(100) == 1
    assert not begins(training)
    (end,) = training.actions("EndJob")
    assert end["reason"]["kind"] == ReasonKind.NO_RESUME.value
    assert catalog.names(Storage(str(folder))) == names


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["durable-rows", "shard-copy"])
def test_kill_during_a_checkpoint_read_makes_survivors_read_again(
    job: Any, tmp_path: Path, place: str, rank: int
):
    folder = tmp_path / "all"
    trained(job, folder, 2, 4)
    rule = f"{place} kill rank={rank} generation=2"
    (*_, found) = trained(
        job, folder, 3, 8, f"--checkpoint-every 3commits {GONE}", ELASTIC_FAILPOINTS=rule
    )
    assert (found["step"], found["size"], found["same"]) == (4, 2, True)
