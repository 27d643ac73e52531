"""Interface of the starters of agent processes on hosts. Implementations make no decisions.

The agent reads its parameters from standard input, as one line of JSON. Therefore neither its arguments nor its
environment contain a secret, and the starter needs no file on the other machine.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from elastic.driver.network.credentials import EtcdAccess, TlsFiles
from elastic.errors import ElasticError

# text that the agent prints, followed by its release, after it has checked its bootstrap
READY = "hvd-elastic agent ready"
AGENT_MODULE = "elastic.driver.agents.agent_process"
# Runs a module like python -m, but without importing from the working directory, which may contain a socket.py. The
# text can be placed in double quotes within single quotes of a shell.
RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    " import runpy; runpy.run_module(sys.argv[1], None, __name__, True)"
)


class Bootstrap(msgspec.Struct, frozen=True):
    """Parameters of an agent process.

    Either ``drivers`` or ``etcd`` is set, and determines where the agent finds the driver.
    """

    job: str
    host: str  # name of the host in the list of hosts
    secret: str  # the job's secret, in hexadecimal
    drivers: list[str] = []  # addresses of drivers, host:port; names are resolved at each attempt
    # File with one address per line, read at each attempt; overrides ``drivers``.
    drivers_file: str = ""
    etcd: EtcdAccess | None = None
    tls: TlsFiles | None = None
    slots: int = 0  # number of slots; 0 means the number of GPUs, or of cores if there are none
    # Interface names or networks. Workers use the first one that exists on this host. Empty means any.
    interfaces: list[str] = []
    outlives: bool = False  # whether the agent continues after its starter process has exited
    folder: str = ""  # working directory of workers; empty means the one that the driver specifies
    log_level: str = "info"
    grace_s: float = 30.0  # seconds from SIGTERM to SIGKILL; the default of Kubernetes and Slurm
    ready_file: str = ""  # path of a file that exists while the agent serves a driver, or empty

    def __repr__(self) -> str:
        return f"Bootstrap({self.job!r}, {self.host!r})"


class StartFailed(ElasticError):
    """Error raised when an agent cannot be started. The message contains the reason and a remedy."""


class Starter(Protocol):
    """Interface that starts agent processes. All methods are called in the thread of the driver's event loop."""

    async def start(self, bootstrap: Bootstrap) -> None:
        """Start the agent of ``bootstrap.host``.

        Returns once the agent has read its bootstrap, even if it has not reached the driver yet.

        Raises:
            StartFailed: no agent runs. Raised within a time limit.
        """

    async def close(self) -> None:
        """End agents that must not outlive this process, and release all resources, within a time limit."""
