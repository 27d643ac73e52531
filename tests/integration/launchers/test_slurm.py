"""A Slurm of this machine alone, and on it the recipe of docs/spot.md: its time is over, it must make room, it is
cancelled. Each time it goes on where it was, or does not begin again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.history import SCRIPTS
from harness.ports import free_ports

ROOT = Path(__file__).parents[3]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
HERE = all(shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in PROGRAMS)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HERE, reason="needs Slurm; apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
]

# As small as it gets. After a job was put back into the queue it may start again once its credential has expired.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 State=UP
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.environ = {
            **os.environ,
            **{
                "SLURM_CONF": str(folder / "slurm.conf"),
                "PATH": path,
                "ELASTIC_PREEMPTION": "slurm",
            },
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, cwd=self.folder
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))

    def submit(self, script: str, *flags: str) -> str:
        path = self.folder / "job.sh"
        path.write_text(script)
        return self.run("sbatch", "--parsable", *flags, str(path))

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T")

    def until(self, job: str, what: str, times: int = 1, within_s: float = 150.0) -> str:
        """Return its output, once this text is in it that often."""
        output = self.folder / f"slurm-{job}.out"
        deadline = time.monotonic() + within_s
        while True:
            said = output.read_text() if output.exists() else ""
            if len(re.findall(what, said)) >= times:
                return said
            assert time.monotonic() < deadline, f"no {what!r} in:\n{said}\n{self.logs()}"
            time.sleep(0.3)

    def until_state(self, job: str, *wanted: str) -> None:
        deadline = time.monotonic() + 60.0
        while (state := self.state(job)) not in wanted:
            assert time.monotonic() < deadline, f"{job} is {state}\n{self.logs()}"
            time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, ports=free_ports(2), cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    here = Cluster(folder)
    munged = [f"--key-file={key}", f"--socket={folder}/munge.socket", "--num-threads=2", "--force"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    here.run("munged", *munged)
    try:
        here.run("slurmctld")
        here.run("slurmd")
        yield here
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            here.run("scancel", "--user", "root")
            deadline = time.monotonic() + 20
            while here.run("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.3)
        for name in ("slurmd", "slurmctld", "munge"):
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                daemon = psutil.Process(int((folder / f"{name}.pid").read_text()))
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(20)


def recipe(checkpoints: Path, limit: str) -> str:
    """That of the docs, of two workers."""
    page = (ROOT / "docs/spot.md").read_text()
    [script] = re.findall(r"```\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    for old, new in (
        ("--time=4:00:00", f"--time={limit} --cpus-per-task={os.cpu_count()}"),
        ("-np 4", "-np 2"),
        ("/shared/bert", str(checkpoints)),
        ("train.py", str(SCRIPTS / "durable.py")),
    ):
        assert script.count(old) == 1, f"{old} in:\n{script}"
        script = script.replace(old, new)
    return str(script)


DURABLE = r"commit (\S+) is durable: rerun the same command to resume from it"


def goes_on_and_ends(cluster: Cluster, job: str, checkpoints: Path) -> None:
    commit = re.findall(DURABLE, cluster.until(job, DURABLE))[0]
    cluster.until(job, rf"training resumes from .*\b{re.escape(commit)}\b")
    cluster.until(job, "the same bits")
    (checkpoints / "enough").touch()
    cluster.until_state(job, "COMPLETED")


def test_a_job_at_its_time_limit_is_requeued_and_resumes(cluster, tmp_path):
    job = cluster.submit(recipe(tmp_path, "1:00"))
    goes_on_and_ends(cluster, job, tmp_path)


def test_a_preempted_job_resumes_after_the_other(cluster, tmp_path):
    job = cluster.submit(recipe(tmp_path, "20:00"))
    cluster.until(job, "rank 0 begins at 0")
    other = "#!/bin/bash\nsleep 1\n"
    cluster.submit(other, "--partition=high", f"--cpus-per-task={os.cpu_count()}", "--time=1")
    goes_on_and_ends(cluster, job, tmp_path)


@pytest.mark.parametrize("fixed", [False, True], ids=["elastic", "fixed"])
def test_a_job_that_is_cancelled_has_its_last_commit_and_is_not_queued_again(
    cluster, tmp_path, monkeypatch, fixed
):
    """Its loader workers get the signal too."""
    script, elastic = recipe(tmp_path, "20:00"), " --min-np 1"
    assert script.count(elastic) == 1
    monkeypatch.setitem(cluster.environ, "LOADERS", "1")
    job = cluster.submit(script.replace(elastic, "") if fixed else script)
    cluster.until(job, "rank 0 begins at 0")
    cluster.run("scancel", job)
    cluster.until(job, DURABLE)
    cluster.until_state(job, "CANCELLED")
    assert cluster.run("squeue", "--noheader", "--jobs", job) == ""
