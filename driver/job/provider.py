"""Interface of an engine that supplies machines, such as Ray or Spark. The engine lists machines and starts agents on
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.discovery.interface import Discovery, Log, ResourceDemand
from elastic.driver.journal.journal import Archive
from elastic.driver.launch.starter import Starter


class Provider(Protocol):
    """Supplies machines. Does not decide about the job. The driver decides when it has how many workers."""

    outlived: bool  # the job can outlive its driver and be resumed by another driver
    fresh: bool  # this is the first driver of the job
    secret: bytes  # secret of the job
    lost: asyncio.Event | None  # set once another driver leads the job

    @property
    def towards(self) -> Sequence[str]:
        """Addresses of some machines, which determine the network on which the driver listens."""

    @property
    def connected(self) -> Callable[[Mapping[str, int]], object] | None:
        """Called with the slots of all hosts with agents after each change; None if the engine lists machines
        itself."""

    def discovery(self, log: Log, need: Callable[[], ResourceDemand]) -> Discovery:
        """Return the discovery of machines and slots.

        Called once. It may call ``need`` at any time in the driver's loop.
        """

    def starter(self, log: Log) -> Starter | None:
        """Return the starter of agents; None if the engine starts them. Called once."""

    def archive(self) -> Archive | None:
        """Return the journal archive that a replacement driver resumes from, or None if the job does not support driver
        failover."""

    def environ_of(self, host: str) -> Mapping[str, str]:
        """Return additional environment variables of this host's workers."""

    async def listening(self, address: str) -> None:
        """Publish the driver's address ``host:port``: to agents of the previous driver, or to those that the engine is
        to start now. Agents can connect."""
