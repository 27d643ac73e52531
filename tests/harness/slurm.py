"""A Slurm of this machine alone, with one daemon per node."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from harness.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
HERE = all(shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in PROGRAMS)

NEEDS_SLURM = [
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
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={port}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=permit_job_expansion
{nodes}
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

    def grow(self, job: str, *flags: str) -> None:
        """Add a node to an allocation: allocate it for another job, which then gives up all nodes."""
        self.run("salloc", "--no-shell", f"--dependency=expand:{job}", "--job-name=more", *flags)
        more = self.run("squeue", "--noheader", "--name=more", "--format=%A")
        self.run("scontrol", "update", f"JobId={more}", "NumNodes=0")

    def nodes(self, job: str) -> list[str]:
        listed = self.run("squeue", "--noheader", "--jobs", job, "--format=%N")
        return self.run("scontrol", "show", "hostnames", listed).split()

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

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-N", node)

    def daemon(self, name: str) -> psutil.Process:
        return psutil.Process(int((self.folder / f"{name}.pid").read_text()))

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node that does not run the batch script, in job steps and beside them."""
        victims = [self.daemon(f"slurmd.{node}")]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                ours = environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
                if ours and environ.get("SLURMD_NODENAME") == node:
                    parents = [process, *process.parents()]
                    victims += [each for each in parents if each.name() != "slurmd"][:2]
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def slurm(folder: Path, nodes: Sequence[str], cores: int) -> Iterator[Cluster]:
    """Run a cluster. A single node should have the name of this machine."""
    host = socket.gethostname().partition(".")[0]
    port, *ports = free_ports(1 + len(nodes))
    lines = (
        f"NodeName={node} NodeAddr=127.0.0.1 Port={own} CPUs={cores}"
        for node, own in zip(nodes, ports, strict=True)
    )
    text = CONFIGURATION.format(host=host, folder=folder, port=port, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    here = Cluster(folder)
    munged = [f"--key-file={key}", f"--socket={folder}/munge.socket", "--num-threads=2", "--force"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    here.run("munged", *munged)
    try:
        here.run("slurmctld")
        for node in nodes:
            here.start_node(node)
        yield here
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            here.run("scancel", "--user", "root")
            deadline = time.monotonic() + 20
            while here.run("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.3)
        for name in (*(f"slurmd.{node}" for node in nodes), "slurmctld", "munge"):
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                daemon = here.daemon(name)
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(20)
