"""Discovery of the nodes in a Slurm allocation, as the Slurm controller lists them for the job in ``SLURM_JOB_ID``.

The list changes when the allocation is resized (``scontrol update JobId=... NumNodes=...``) and when a node is drained
or goes down. Nodes that do not respond to the controller stay in the list: their workers may still be training, and the
driver detects a lost node sooner, through the connection to its agent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.driver.discovery.polling import execute
from elastic.errors import Invalid

# Seconds between queries. The interval is long, because all jobs of the cluster share the controller.
INTERVAL_S = 15.0
ANSWER_S = 10.0
CHECK = "Check Slurm with `scontrol ping`"
# States of nodes on which no worker is started, from sinfo(1), "NODE STATE CODES".
UNUSABLE = frozenset({"down", "drained", "draining", "error", "fail", "failing", "unknown"})


@dataclass(frozen=True)
class Allocation:
    """Slurm allocation of the job, which can be queried for its nodes.

    Args:
        job: ID of the Slurm job.
        slots: number of slots on each node.
        environ: environment variables for Slurm's commands.
    """

    job: str
    slots: int
    environ: Mapping[str, str] = field(repr=False)

    async def hosts(self) -> dict[str, int]:
        """Return the usable nodes and their slots.

        Raises:
            Invalid: the Slurm controller does not respond, or the Slurm job has ended.
        """
        jobs = await self._run("squeue", "--noheader", f"--jobs={self.job}", "--format=%A|%N")
        nodes = nodes_of(self.job, jobs)
        if not nodes:
            raise Invalid(
                f"squeue lists no nodes for Slurm job {self.job}, because the job has ended: run elasticrun inside a"
                " running job"
            )
        states = await self._run(
            "sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T"
        )
        return dict.fromkeys(usable_nodes(states), self.slots)

    async def _run(self, *command: str) -> str:
        try:
            code, output, errors = await execute([*command], ANSWER_S, env=self.environ)
        except asyncio.TimeoutError:
            raise Invalid(f"{command[0]} did not answer within {ANSWER_S:g} s. {CHECK}") from None
        except OSError as error:
            raise Invalid(f"{command[0]} can't be started: {error.strerror}. {CHECK}") from None
        if code != 0:
            last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise Invalid(
                f"{command[0]} ended with exit code {code}: {''.join(last)[:200]}. {CHECK}"
            )
        return output.decode("utf-8", "replace")


def allocation(environ: Mapping[str, str], slots_per_host: int | None) -> Allocation:
    """Return the allocation in which this process runs.

    Args:
        environ: environment of this process.
        slots_per_host: number of slots on each node. None means the result of `slots_per_node`.

    Raises:
        Invalid: this process is not in an allocation, or the number of slots differs between nodes.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise Invalid(
            "--slurm needs a Slurm allocation, but SLURM_JOB_ID is not set: run elasticrun in a script of sbatch, or"
            " in the shell of salloc"
        )
    return Allocation(job, slots_per_host or slots_per_node(environ), commands_environ(environ))


def commands_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands, without the variables of the allocation.

    The commands would use these variables as options. Their values are outdated after the allocation is resized.
    """
    options = re.compile(r"(?!SLURM_CONF$)(SLURM|SLURMD|SRUN|SQUEUE|SINFO)_\w+")
    return {name: value for name, value in environ.items() if not options.fullmatch(name)}


def slots_per_node(environ: Mapping[str, str]) -> int:
    """Return the number of slots on each node: its GPUs if the job requested GPUs, otherwise its tasks.

    Raises:
        Invalid: nodes have different numbers of tasks.
    """
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdecimal() and int(gpus) > 0:
        return int(gpus)
    tasks = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    if found := re.fullmatch(r"(\d+)(?:\(x\d+\))?", tasks):
        return max(1, int(found[1]))
    raise Invalid(
        f"the nodes of the Slurm allocation have different numbers of tasks, SLURM_TASKS_PER_NODE={tasks}: pass"
        " --slots-per-host N, or request the same number on each node with --ntasks-per-node"
    )


def nodes_of(job: str, lines: str) -> str:
    """Return a job's node list from squeue's ``ID|NODES`` lines.

    The lines may contain other jobs: if the ID is also that of a job array, squeue lists all tasks of the array.
    """
    rows = (line.partition("|") for line in lines.splitlines())
    return next((nodes.strip() for number, _, nodes in rows if number.strip() == job), "")


def usable_nodes(lines: str) -> list[str]:
    """Return the names of the usable nodes from sinfo's lines ``NODE|STATE``.

    A node in several partitions has several lines, but is returned once. Symbols after a state are ignored, such as
    ``*`` for a node that does not respond.
    """
    rows = [line.partition("|") for line in lines.splitlines()]
    names = (name for name, _, state in rows if state.strip().rstrip("*~#!%$@^-+") not in UNUSABLE)
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))
