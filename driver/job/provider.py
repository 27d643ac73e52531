"""The seam under an engine that supplies machines, such as Ray: it says which there are, and puts an agent on one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.discovery.interface import Discovery, Log, Need
from elastic.driver.journal.journal import Archive
from elastic.driver.launch.starter import Starter


class Provider(Protocol):
    """Decides nothing about the job: how many workers it has, and when, is for the driver to say."""

    outlived: bool  # the job may outlive its driver, and another one go on with it
    fresh: bool  # this driver is the job's first
    secret: bytes  # of the job
    lost: asyncio.Event | None  # set once another driver has the job

    @property
    def towards(self) -> Sequence[str]:
        """Addresses of some machines, by which is found out on which network the driver has to listen."""

    def discovery(self, log: Log, need: Callable[[], Need]) -> Discovery:
        """The machines and their slots. Called once; ``need`` as often as wanted, in the driver's loop."""

    def starter(self, log: Log) -> Starter:
        """Starts an agent on one of them. Called once."""

    def archive(self) -> Archive | None:
        """Where the journal is kept that another driver goes on from; None: the job ends with this one."""

    def environ_of(self, host: str) -> Mapping[str, str]:
        """Environment variables of this host's workers, in addition to those of all workers."""

    async def listening(self, address: str) -> None:
        """The driver is found at ``host:port`` from here on: agents that belong to the driver before have to know."""
