"""Interface of the starters, which start agent processes on hosts. Implementations make no decisions.

The agent reads its parameters from standard input, as one line of JSON. Therefore neither its arguments nor its
environment contain a secret, and the starter needs no file on the other machine.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from elastic.driver.network.credentials import EtcdAccess, TlsFiles
from elastic.errors import ElasticError

# line prefix that the agent prints before its release, once it has validated its bootstrap
READY = "hvd-elastic agent ready"
AGENT_MODULE = "elastic.driver.agents.agent_main"
# Runs a module like python -m, but does not import from the working directory, where a file such as socket.py would
# shadow a standard module. The text can be quoted in a shell with double quotes inside single quotes.
RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    " import runpy; runpy.run_module(sys.argv[1], None, __name__, True)"
)


class Bootstrap(msgspec.Struct, frozen=True):
    """Parameters of an agent process.

    Either ``drivers`` or ``etcd`` is set. The agent uses it to find the driver.
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
    # whether the agent keeps running after the process that started it has exited
    outlives: bool = False
    folder: str = ""  # working directory of workers; empty means the one that the driver specifies
    log_level: str = "info"
    # seconds between SIGTERM and SIGKILL; the default is that of Kubernetes and Slurm
    grace_s: float = 30.0
    ready_file: str = ""  # path of a file that exists while the agent serves a driver, or empty

    def __repr__(self) -> str:
        return f"Bootstrap({self.job!r}, {self.host!r})"


class StartFailed(ElasticError):
    """Error raised when an agent cannot be started. The message contains the reason and a remedy."""


class Starter(Protocol):
    """Interface for starting agent processes. The driver calls all methods in the thread of its event loop."""

    async def start(self, bootstrap: Bootstrap) -> None:
        """Start the agent of ``bootstrap.host``.

        Returns when the agent has read its bootstrap, possibly before it has connected to the driver.

        Raises:
            StartFailed: the agent could not be started within the time limit of the starter.
        """

    async def close(self) -> None:
        """Stop the agents that must not outlive this process and release all resources, within a time limit."""
