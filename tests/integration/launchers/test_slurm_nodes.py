"""``elasticrun --slurm`` in an allocation of a real Slurm with three nodes, which are daemons of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.history import SCRIPTS
from harness.slurm import NEEDS_SLURM, Cluster, slurm
from harness.step_lines import Step, StepFiles, committed_lost

pytestmark = NEEDS_SLURM
NODES = ("n1", "n2", "n3")
SLOTS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm"), NODES, SLOTS) as here:
        yield here


class SlurmJob:
    """An elastic job on the nodes of an allocation, which keeps making steps."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: int, flags: str) -> None:
        self.cluster = cluster
        self._parent = folder
        self.restarted(0)
        run = f"{folder}/${{SLURM_RESTART_COUNT:-0}}"
        script = (
            f"#!/bin/bash\nexec elasticrun --slurm {flags} python {SCRIPTS}/stepping.py {run}\n"
        )
        request = (f"--nodes={nodes}", f"--ntasks-per-node={SLOTS}", "--no-kill", "--time=10")
        self.id = cluster.submit(script, *request)

    def restarted(self, count: int) -> None:
        """Follow the steps after this number of requeues."""
        self.folder = self._parent / str(count)
        self.folder.mkdir()
        self._files = StepFiles(self.folder)

    def steps(self) -> list[Step]:
        return self._files.steps()

    def world(self, nodes: set[str]) -> list[Step]:
        """Wait until the newest world has all slots of these nodes and no other worker; return its last steps."""

        def found() -> list[Step]:
            world = self._files.newest_world()
            places = [node_of(step.pid) for step in world]
            return world if sorted(places) == sorted([*nodes] * SLOTS) else []

        return self.wait(found, f"a world on {sorted(nodes)}")

    def wait(self, found: Callable[[], list[Step]], awaited: str) -> list[Step]:
        deadline = time.monotonic() + 90.0
        while not (result := found()):
            output = self.cluster.folder / f"slurm-{self.id}.out"
            text = output.read_text() if output.exists() else ""
            assert time.monotonic() < deadline, f"no {awaited}:\n{text}\n{self.cluster.logs()}"
            time.sleep(0.2)
        return result

    def finish(self) -> None:
        (self.folder / "stop").touch()
        self.cluster.until_state(self.id, "COMPLETED")
        assert committed_lost(self._files.steps()) == 0


def node_of(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get("SLURMD_NODENAME", "")
    except psutil.Error:
        return ""


def test_slurm_job_when_a_node_fails_then_continues_and_uses_the_node_again(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, 2, "-np 4 --min-np 2")
    before = job.world({"n1", "n2"})

    cluster.kill_node("n2")
    after = job.world({"n1"})
    assert {step.pid for step in after} < {step.pid for step in before}

    cluster.start_node("n2")
    job.world({"n1", "n2"})
    job.finish()


def test_a_job_when_a_node_is_drained_or_released_then_follows(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, 3, "-np 6 --min-np 2")
    job.world({"n1", "n2", "n3"})

    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a failing GPU")
    job.world({"n1", "n3"})
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.world({"n1", "n2", "n3"})

    cluster.run("scontrol", "update", f"JobId={job.id}", "NumNodes=2")
    job.world({"n1", "n2"})
    job.finish()


def test_slurm_job_when_a_node_is_added_then_trains_on_the_node(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, 2, "-np 4 --min-np 2 --max-np 6")
    before = job.world({"n1", "n2"})
    cluster.grow(job.id, "--nodes=1", f"--ntasks-per-node={SLOTS}", "--time=10")
    after = job.world({"n1", "n2", "n3"})
    assert {step.pid for step in before} < {step.pid for step in after}
    job.finish()


def test_a_job_that_was_resized_when_requeued_then_resumes(cluster, tmp_path):
    flags = f"-np 4 --min-np 2 --max-np 6 --checkpoint-dir {tmp_path}/checkpoints"
    job = SlurmJob(cluster, tmp_path, 3, flags)
    job.world({"n1", "n2", "n3"})
    cluster.run("scontrol", "update", f"JobId={job.id}", "NumNodes=1")
    job.world({"n1"})
    cluster.grow(job.id, "--nodes=1", f"--ntasks-per-node={SLOTS}", "--time=10", "--nodelist=n3")
    job.world({"n1", "n3"})
    cluster.run("scontrol", "requeue", job.id)
    cluster.until_state(job.id, "PENDING")
    last = max(step.step for step in job.steps())
    job.restarted(1)
    cluster.until_state(job.id, "RUNNING")
    job.world(set(cluster.nodes(job.id)))
    assert min(step.step for step in job.steps()) >= last
    job.finish()


def test_a_job_of_a_fixed_size_when_the_allocation_is_too_small_then_is_refused(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, 1, f"-np {SLOTS + 1}")
    cluster.until_state(job.id, "FAILED")
    assert not [*tmp_path.glob("**/*.steps")]
