"""Starter of agents on the nodes of a Slurm allocation with srun, in one job step per node.

The bootstrap is sent on srun's standard input. Slurm authenticates that connection but does not encrypt it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from elastic.driver.launch.subprocess_starter import ChildStarter
from elastic.driver.output_interfaces import Log

READY_S = 60.0


def srun_starter(job: str, *, environ: Mapping[str, str], python: str, log: Log) -> ChildStarter:
    """Return a starter that starts agents with srun. Must be called in the event loop.

    Args:
        job: ID of the Slurm job.
        environ: environment of srun and of the agents.
        python: path of the Python on the nodes.
        log: called with the level and the text of each log line.
    """
    return ChildStarter(
        environ=environ, log=log, python=python, through=partial(srun, job), ready_s=READY_S
    )


def srun(job: str, host: str) -> list[str]:
    """Return the prefix of an srun command line that runs the appended command on ``host``.

    The step overlaps with other steps, so that the agent can use all of the node's part of the allocation: its cores,
    memory and GPUs.
    """
    step = ["--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--kill-on-bad-exit=0", "--quiet"]
    return ["srun", f"--jobid={job}", f"--nodelist={host}", *step]
