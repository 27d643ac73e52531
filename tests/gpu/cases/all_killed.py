"""All workers and the driver are killed: the same command resumes from the newest durable commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gpu.machine import Machine
from gpu.programs import ELASTICRUN, WORKERS, environment
from gpu.results import Result
from harness import wording
from harness.job import Job


def run(machine: Machine, result: Result, folder: Path) -> None:
    kept = folder / "checkpoints"
    flags = f"-np {machine.ranks} --min-np 1 --checkpoint-dir {kept} --checkpoint-every 5commits"
    kept.mkdir(parents=True)
    for name, dies in (("first", True), ("second", False)):
        inside = folder / name
        inside.mkdir()
        env = environment(machine, STEPS="60", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        command = [str(WORKERS / "durable.py")]
        job = Job(flags, command, folder=inside, env=env, program=ELASTICRUN)
        try:
            if dies:
                job.wait_for(r"step 40\b", 60 * machine.time_factor)
                for each in job.processes():
                    os.kill(each.pid, signal.SIGKILL)
                continue
            job.succeed(60 * machine.time_factor)
            began = int(job.wait_for(wording.BEGINS_AT_STEP, 1)[1])
            result.figure("goes on at step", began)
            result.figure(
                "bits differ from the model of that step", job.wait_for(r"differ (\d+)", 1)[1]
            )
            assert began >= 5, f"it began at step {began}"
            assert "differ 0" in job.output, job.output
            assert wording.ENDS_AT_STEP in job.output, job.output
        finally:
            job.end()
            (inside / "output.txt").write_text(job.output)
