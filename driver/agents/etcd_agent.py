"""Agent that registers in etcd and looks up its driver there. Performs I/O."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from elastic.driver.agents.driver_connection import NoDriver
from elastic.driver.agents.host_agent import HostAgent
from elastic.driver.etcd.client import EtcdClient
from elastic.driver.etcd.connection import Unavailable
from elastic.driver.etcd.host_registration import Registration
from elastic.driver.etcd.keys import LeaderAddress, job_root
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.credentials import EtcdAccess
from elastic.driver.network.name_lookup import numeric
from elastic.driver.output_interfaces import Log


class _Generation(msgspec.Struct):
    """Generation of the newest world, which the driver writes to etcd. See `elastic.driver.job.start_multi_host`."""

    generation: int
    job: str


async def serve_by_etcd(
    bootstrap: Bootstrap, access: EtcdAccess, *, slots: int, bound: bool, log: Log
) -> int:
    """Run an agent until it exits, and return its exit code.

    Args:
        bootstrap: configuration of the agent.
        access: endpoints and credentials of etcd.
        slots: number of slots of this host.
        bound: whether a driver started the agent and therefore knows its host.
        log: called with the level and the text of each log line.

    Raises:
        Invalid: etcd cannot be used, or another agent serves this host.
    """
    seat = _Seat()
    etcd = EtcdClient(access, log)
    await etcd.open()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(etcd.close)
        process = HostAgent(bootstrap, seat.find, slots=slots, bound=bound, log=log)
        registration = Registration(
            etcd, bootstrap.job, bootstrap.host, slots, process.identity.incarnation, log
        )
        if not bound:
            await registration.open()
            stack.push_async_callback(registration.close)
        tasks = [
            asyncio.ensure_future(_watch_driver(registration, seat, process)),
            asyncio.ensure_future(_watch_generation(etcd, bootstrap.job, process)),
            asyncio.ensure_future(_end_with_registration(registration, process)),
        ]
        try:
            return await process.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Seat:
    """Cache of the driver address in etcd."""

    def __init__(self) -> None:
        self._seat: LeaderAddress | None = None
        self._changed = asyncio.Event()

    def set_leader(self, seat: LeaderAddress | None) -> None:
        self._seat = seat
        self._changed.set()

    async def find(self) -> list[tuple[str, int]]:
        """Return the driver's addresses. Waits while no driver leads the job."""
        while self._seat is None:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._changed.wait(), 30.0)
            if self._seat is None:
                raise NoDriver(
                    "no driver of this job is registered in etcd: start elasticrun with the same --job"
                )
        try:
            return await numeric(self._seat.address)
        except OSError as error:
            raise NoDriver(str(error)) from None


async def _watch_driver(registration: Registration, seat: _Seat, process: HostAgent) -> None:
    with contextlib.suppress(Unavailable):
        async for found in registration.watch_driver():
            seat.set_leader(found)
            if found is not None:
                process.driver_leads(found.term)


async def _watch_generation(etcd: EtcdClient, job: str, process: HostAgent) -> None:
    latest: _Generation | None = None

    async def look_again() -> None:
        while True:
            await asyncio.sleep(0.5)
            if latest is not None:
                process.fence(latest.generation, latest.job)

    looking = asyncio.ensure_future(look_again())
    try:
        async for item in etcd.watch(f"{job_root(job)}generation"):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
                latest = None if item is None else msgspec.json.decode(item.value, type=_Generation)
    except Unavailable:
        return
    finally:
        looking.cancel()


async def _end_with_registration(registration: Registration, process: HostAgent) -> None:
    await registration.ended.wait()
    process.end(1, registration.why)
