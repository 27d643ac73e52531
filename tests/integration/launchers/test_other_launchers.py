"""Without elasticrun: under torchrun, mpirun or srun, or with variables set by hand, ranks find each other and train.

torchrun is the real one. Of the others only what they set is here.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import CollectiveFailed, Invalid
from elastic.rendezvous import find_rank0, worker_settings
from elastic.rendezvous.find_rank0 import Rank0Endpoint, meet
from elastic.rendezvous.launcher_detection import ByAddress, ByFile, LauncherEnv
from harness.forked import MARK, Forked
from harness.golden import raises, recorded
from harness.history import SCRIPTS
from harness.ports import free_port
from harness.torchrun import torchrun

SCRIPT = SCRIPTS / "other_launcher.py"
FOREIGN = ("ELASTIC_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_")
LIMIT_S = 100.0


def clean(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        kept.pop(name, None)
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def launch(what: str, variables: Sequence[Mapping[str, str]]) -> list[Forked]:
    """One process for each rank."""
    return [
        Forked(
            [sys.executable, str(SCRIPT), what],
            folder=Path.cwd(),
            env=clean(each),
            mark=f"{MARK}={uuid.uuid4().hex}",
        )
        for each in variables
    ]


def outputs(processes: list[Forked]) -> list[str]:
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
    return [process.printed() for process in processes]


def said(output: str) -> list[dict[str, Any]]:
    # Not by lines: what several processes write into one pipe may stand on one.
    parts = output.split("said {")[1:]
    return [json.JSONDecoder().raw_decode("{" + part)[0] for part in parts]


def by_hand(size: int, **more: str) -> list[dict[str, str]]:
    port = str(free_port())
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more
    return [{"RANK": str(rank)} | shared for rank in range(size)]


# ---- real processes


def test_torchrun_restart_forms_a_world_and_repeated_shutdowns_leak_no_resources():
    """Remains of the first start at the agent have no effect. Then a hundred times shutdown() and init()."""
    printed = torchrun(SCRIPT, "torchrun", env=clean({}), restarts=1)
    found = sorted(said(printed), key=lambda each: each["place"])
    assert [each["place"] for each in found] == [[rank, 2, rank, 2, 0, 1] for rank in range(2)]
    for each in found:
        assert (each["sum"], each["torch's own"]) == (3.0, 2.0)
        assert each["after"][0] <= each["before"][0], "descriptors"
        assert each["after"][1] <= each["before"][1], "threads"


def test_lost_peer_of_a_manually_started_world_raises_horovods_error():
    """Raises Horovod's error immediately; the world can't be formed again, which is logged at once, too."""
    first, second = outputs(launch("loss", by_hand(2)))
    [told] = said(first)
    assert told["place"] == [0, 2, 0, 2, 0, 1], second
    assert told["raised"] and told["after"] < 30
    recorded("messages", told["again"])
    assert said(second) == []


def test_two_jobs_started_by_mpirun_and_srun_at_once_form_separate_worlds():
    mpirun = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"test-{os.getpid()}@1",
        }
        for rank in range(2)
    ]
    srun = [
        {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
        }
        for rank in range(2)
    ]
    found = outputs(launch("place", [*mpirun, *srun]))
    for rank, output in enumerate([*found[:2]]):
        assert said(output) == [{"place": [rank, 2, rank, 2, 0, 1], "sum": 3.0}], output
    for rank, output in enumerate([*found[2:]]):
        assert said(output) == [{"place": [rank, 2, rank, 2, 0, 1], "sum": 3.0}], output


# ---- meeting, in threads of this process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the rendezvous folder of ranks of one host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"hvd-elastic-{os.getuid()}"


def env(seconds: float = 20.0) -> worker_settings.Environment:
    return worker_settings.read(
        {"HOROVOD_START_TIMEOUT": str(seconds), "ELASTIC_BIND": "127.0.0.1"}
    )


def rank(number: int, size: int = 2, name: str = "job") -> LauncherEnv:
    return LauncherEnv("mpirun", number, size, None, ByFile(name))


def test_the_file_is_private_contains_a_secret_and_is_removed(folder):
    seen: list[int] = []

    def watch(started: LauncherEnv) -> bytes:
        met = meet(started, env())
        if started.rank == 1:
            met.store.close()
        return met.env.secret

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(watch, rank(0))
        file = folder / "job"
        appeared = threading.Event()
        while not file.exists():
            appeared.wait(0.005)
        seen += [stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(file.stat().st_mode)]
        second = pool.submit(watch, rank(1))
        assert first.result(20) == second.result(20)
        assert len(first.result()) == 32
    assert seen == [0o700, 0o600]
    assert list(folder.iterdir()) == []


def test_rendezvous_file_of_a_dead_job_does_not_affect_another_job(folder):
    dead = free_port()  # nothing listens on it
    find_rank0.private_folder()
    find_rank0._File(ByFile("job")).publish(Rank0Endpoint("127.0.0.1", dead, b"old"))
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(meet, rank(1), env())
        meet(rank(0), env())
        assert late.result(20).store.address.port != dead


def test_a_missing_rank_is_reported(folder):
    with raises(CollectiveFailed):
        meet(rank(1), env(0.1))
    with raises(CollectiveFailed):
        meet(rank(0), env(0.1))


def test_rank_0_may_arrive_last_at_the_rendezvous(monkeypatch):
    monkeypatch.setattr(find_rank0, "REACH_S", 0.05)
    way = ByAddress("127.0.0.1", free_port(), b"secret")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, LauncherEnv("srun", 1, 2, None, way), env())
        threading.Event().wait(0.3)
        meet(LauncherEnv("srun", 0, 2, None, way), env())
        assert first.result(20).env.bind_host == "127.0.0.1"


def test_rendezvous_folder_accessible_to_other_users_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o755)
    with raises(Invalid):
        meet(rank(0), env())


def test_a_used_port_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        way = ByAddress("127.0.0.1", taken.getsockname()[1], b"")
        with raises(Invalid):
            meet(LauncherEnv("srun", 0, 2, None, way), env())


def test_an_unknown_host_is_an_error():
    way = ByAddress("nowhere.invalid", 1, b"")
    with raises(Invalid):
        meet(LauncherEnv("srun", 1, 2, None, way), env())
