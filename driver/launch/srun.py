"""Starts agents on the nodes of a Slurm allocation with srun, one job step per node.

The steps overlap, so each agent can use all of the node's part of the allocation: its cores, memory and GPUs. The
bootstrap is sent on standard input. Slurm authenticates that connection and does not encrypt it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from elastic.driver.launch.child_processes import ChildProcess, ChildProcesses
from elastic.driver.launch.ssh_failures import why_ended, why_no_agent
from elastic.driver.launch.starter import AGENT_MODULE, RUN_MODULE, Bootstrap, StartFailed
from elastic.driver.sinks import Log
from elastic.version import __version__

AT_ONCE = 32
READY_S = 60.0
CLOSE_S = 10.0


class SrunStarter:
    """Starts agents with srun. Must be created in the event loop.

    Args:
        job: ID of the Slurm job.
        environ: environment of srun and of the agents.
        python: path of the Python on the nodes.
    """

    def __init__(self, job: str, *, environ: Mapping[str, str], python: str, log: Log) -> None:
        self._job = job
        self._environ = environ
        self._python = python
        self._children = ChildProcesses(
            log,
            lambda host, process: why_ended(host, process.code, process.said(), by_ssh=False),
            at_once=AT_ONCE,
            ready_s=READY_S,
            close_s=CLOSE_S,
        )

    async def start(self, bootstrap: Bootstrap) -> None:
        command = self.command(bootstrap.host)
        explain = partial(self._explain, bootstrap.host)
        try:
            await self._children.begin(bootstrap, command, self._environ, explain)
        except OSError as error:
            raise StartFailed(
                f"no agent can be started on {bootstrap.host}: srun: {error.strerror}"
            ) from None

    async def close(self) -> None:
        await self._children.close(spare=False)

    def command(self, host: str) -> list[str]:
        """Return the command that starts an agent on ``host``."""
        return [
            "srun",
            f"--jobid={self._job}",
            f"--nodelist={host}",
            "--nodes=1",
            "--ntasks=1",
            "--overlap",
            "--mem=0",  # all of the job's memory on the node
            "--kill-on-bad-exit=0",
            "--quiet",
            self._python,
            "-c",
            RUN_MODULE,
            AGENT_MODULE,
        ]

    async def _explain(self, host: str, process: ChildProcess, release: str | None) -> str:
        return why_no_agent(
            host, process.code, process.said(), ours=__version__, release=release, limit_s=READY_S
        )
