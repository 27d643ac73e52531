"""Interface of an engine, such as Ray or Spark, that lists machines and starts agents on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.discovery.interface import Discovery, Log, ResourceDemand
from elastic.driver.events import Event
from elastic.driver.journal.journal import Archive
from elastic.driver.launch.starter import Starter


class Provider(Protocol):
    """Interface of a source of machines for a job. The driver decides how many workers the job has."""

    outlived: bool  # whether the job can outlive its driver and be resumed by another one
    fresh: bool  # whether to start a new job, because this is the job's first driver
    secret: bytes  # secret of the job
    # event that is set when another driver leads the job; None without driver failover
    lost: asyncio.Event | None

    @property
    def towards(self) -> Sequence[str]:
        """Return addresses of some machines, by which the driver chooses the network interface to listen on."""

    @property
    def connected(self) -> Callable[[Mapping[str, int]], object] | None:
        """Return a callback that receives the slots of all hosts with agents after each change.

        None means that the engine's own discovery lists the machines.
        """

    def discovery(
        self, log: Log, need: Callable[[], ResourceDemand], noticed: Callable[[Event], None]
    ) -> Discovery:
        """Return the discovery of machines and slots. Called once.

        The discovery calls ``need`` for the current demand, in the driver's event loop, and ``noticed`` with each
        preemption notice.
        """

    def starter(self, log: Log) -> Starter | None:
        """Return the starter of agents, or None if the engine starts them. Called once."""

    def archive(self) -> Archive | None:
        """Return the archive of the journal for replacement drivers, or None without driver failover."""

    def environ_of(self, host: str) -> Mapping[str, str]:
        """Return additional environment variables for the workers of a host."""

    async def listening(self, address: str) -> None:
        """Publish the driver's address ``host:port``, to which agents can connect from now on.

        The address is read by agents of the previous driver and by agents that the engine starts later.
        """
