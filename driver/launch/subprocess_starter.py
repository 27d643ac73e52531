"""Starter of agents as child processes in separate sessions, run directly or through a program such as srun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from elastic.driver.launch.child_processes import ChildProcess, ChildProcesses
from elastic.driver.launch.ssh_failures import why_ended, why_no_agent
from elastic.driver.launch.starter import AGENT_MODULE, RUN_MODULE, Bootstrap, StartFailed
from elastic.driver.output_interfaces import Log
from elastic.version import __version__

READY_S = 30.0
CLOSE_S = 10.0


class ChildStarter:
    """Starter of agents as child processes. Must be created in the event loop.

    Tests use it to run several agents with different host names on one machine.

    Args:
        environ: environment of agents and their workers, except for the driver's secrets.
        through: function that returns, for a host, the command-line prefix of the Python command, such as that of srun.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        log: Log,
        python: str = sys.executable,
        through: Callable[[str], Sequence[str]] = lambda host: (),
        at_once: int = 32,
        ready_s: float = READY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._environ = environ
        self._python = python
        self._through = through
        self._ready_s = ready_s
        self._children = ChildProcesses(
            log,
            lambda host, process: why_ended(
                host, process.code, process.last_output(), by_ssh=False
            ),
            at_once=at_once,
            ready_s=ready_s,
            close_s=close_s,
        )

    async def start(self, bootstrap: Bootstrap) -> None:
        async def explain(process: ChildProcess, release: str | None) -> str:
            return why_no_agent(
                bootstrap.host,
                process.code,
                process.last_output(),
                ours=__version__,
                release=release,
                limit_s=self._ready_s,
            )

        command = [*self._through(bootstrap.host), self._python, "-c", RUN_MODULE, AGENT_MODULE]
        try:
            await self._children.begin(bootstrap, command, self._environ, explain)
        except OSError as error:
            raise StartFailed(
                f"no agent can be started on {bootstrap.host}, because {command[0]} can't be started:"
                f" {error.strerror}. Check that it is installed and executable"
            ) from None

    async def close(self) -> None:
        await self._children.close(spare=True)
