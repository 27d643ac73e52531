"""Interface of an engine such as Ray or Spark that lists machines and starts agents on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.discovery.interface import Discovery, Log, ResourceDemand
from elastic.driver.events import Event
from elastic.driver.journal.journal import Archive
from elastic.driver.launch.starter import Starter


class Provider(Protocol):
    """Source of machines for a job, implemented by an engine. The driver decides how many workers the job has."""

    outlived: bool  # whether the job can outlive its driver and be resumed by another one
    fresh: bool  # whether this is the first driver of the job
    secret: bytes  # secret of the job
    lost: asyncio.Event | None  # event that is set when another driver leads the job, or None

    @property
    def towards(self) -> Sequence[str]:
        """Return the addresses of some machines, which determine the network on which the driver listens."""

    @property
    def connected(self) -> Callable[[Mapping[str, int]], object] | None:
        """Return a callback for the slots of all hosts with agents, or None if the engine itself lists machines.

        It is called after each change.
        """

    def discovery(
        self, log: Log, need: Callable[[], ResourceDemand], noticed: Callable[[Event], None]
    ) -> Discovery:
        """Return the discovery of machines and slots. Called once.

        The discovery may call ``need`` at any time in the driver's loop. It calls ``noticed`` with each preemption
        notice.
        """

    def starter(self, log: Log) -> Starter | None:
        """Return the starter of agents, or None if the engine starts them. Called once."""

    def archive(self) -> Archive | None:
        """Return the archive of the journal from which a replacement driver resumes, or None if the job does not
        support driver failover.
        """

    def environ_of(self, host: str) -> Mapping[str, str]:
        """Return additional environment variables for the workers of a host."""

    async def listening(self, address: str) -> None:
        """Publish the driver's address ``host:port``, to which agents can connect from now on.

        Agents of the previous driver, and agents that the engine starts later, read it.
        """
