"""The seam under every way to start an agent process on a host. Adapters of this interface have no policy.

What the process has to know arrives on its standard input, one line of JSON: neither its arguments nor its environment
hold a secret, and whoever starts it needs no file on the other machine.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from elastic.driver.network.credentials import EtcdAccess, TlsFiles
from elastic.errors import ElasticError

READY = "hvd-elastic agent ready"  # the agent writes this line, and its release, once it has checked its bootstrap
AGENT_MODULE = "elastic.driver.agents.agent_process"
# To run a module as python -m does, but to import nothing from the folder that it starts in: a user's socket.py, say.
# It fits between double quotes in a shell's single ones.
RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    " import runpy; runpy.run_module(sys.argv[1], None, __name__, True)"
)


class Bootstrap(msgspec.Struct, frozen=True):
    """What an agent process is told at its start. Exactly one of ``drivers`` and ``etcd`` says where the driver is."""

    job: str
    host: str  # by this name it is listed
    secret: str  # of the job, hexadecimal
    drivers: list[str] = []  # host:port, names are looked up anew at each try
    # Holds the same, one a line, and is read anew at each try; before ``drivers``.
    drivers_file: str = ""
    etcd: EtcdAccess | None = None
    tls: TlsFiles | None = None
    slots: int = 0  # 0: as many as there are GPUs, else cores
    # Names or networks, the first that this host has is for the workers' data; empty: any.
    interfaces: list[str] = []
    outlives: bool = False  # it goes on without the process that started it
    folder: str = ""  # workers start there; empty: where the driver says
    log_level: str = "info"
    grace_s: float = 30.0  # from SIGTERM to SIGKILL, as Kubernetes and Slurm have it by default
    ready_file: str = ""  # exists while the agent serves a driver; empty: no such file

    def __repr__(self) -> str:
        return f"Bootstrap({self.job!r}, {self.host!r})"


class StartFailed(ElasticError):
    """No agent could be started; the text says why, and what to do."""


class Starter(Protocol):
    """Starts agent processes. All calls come from the thread of the driver's event loop."""

    async def start(self, bootstrap: Bootstrap) -> None:
        """Start the agent of ``bootstrap.host``; return once it runs and has read its bootstrap.

        Whether it finds the driver is seen when it does. Raises StartFailed, within a bound.
        """

    async def close(self) -> None:
        """End those that do not outlive us, and release everything, within a bound."""
