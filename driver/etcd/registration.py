"""An agent's place in etcd: the key of its host, kept under a lease; and where the driver is. Decides little:

the key is gone                   put it again, if need be under a new lease
a later start of this host's agent has it    it has taken over: we end
an earlier one has it             ours now; but at our start that one may live, and then we are refused
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from elastic.driver.etcd.client import Etcd, Item, Put, Unchanged
from elastic.driver.etcd.connection import LeaseGone, Rejected, Unavailable
from elastic.driver.etcd.endpoints import Log
from elastic.driver.etcd.keys import (
    DriverSeat,
    HostRecord,
    check_host,
    check_slots,
    job_root,
    read_host,
    read_seat,
    seat_of,
)
from elastic.errors import Invalid

EXPIRY_S = 1.5  # etcd notices within this time that a lease is over
LOOK_S = 0.25  # between two looks at the lease of a predecessor


class Registration:
    """``incarnation`` grows with every start of the host's agent. ``ended``: a later start has taken over

    Close it before the connection to etcd. ``why`` is what was logged when it ended.
    """

    def __init__(
        self,
        etcd: Etcd,
        job: str,
        host: str,
        slots: int,
        incarnation: int,
        log: Log,
        *,
        ttl_s: float = 5.0,
    ) -> None:
        self.ended = asyncio.Event()
        self.why = ""
        self._etcd = etcd
        self._root = job_root(job)
        self._host = check_host(host)
        self._key = f"{self._root}hosts/{host}"
        self._record = HostRecord(check_slots(slots), incarnation)
        self._log = log
        self._ttl_s = ttl_s
        self._lease = 0
        self._claiming = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Be registered. Raises Invalid if another agent serves this host and lives, Unavailable without etcd.

        One that has died is waited for until its lease is over.
        """
        await self._predecessor_gone()
        await self._claim(within_s=5.0)
        if self.ended.is_set():
            raise Invalid(self._taken())
        self._tasks = [
            asyncio.ensure_future(self._go_on(each)) for each in (self._keep, self._look)
        ]

    async def close(self) -> None:
        """Take the host off the list."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._lease:
            with contextlib.suppress(Unavailable, Rejected):  # it runs out by itself
                await self._etcd.revoke(self._lease, within_s=2.0)

    async def watch_driver(self) -> AsyncGenerator[DriverSeat | None, None]:
        """Where the driver is, then each change of it; None: none leads, or none has said yet where it is."""
        last: DriverSeat | None = None
        first = True
        async with contextlib.aclosing(self._etcd.watch(f"{self._root}driver")) as looks:
            async for item in looks:
                seat = seat_of(read_seat(item.value) if item else None)
                if first or seat != last:
                    first, last = False, seat
                    yield seat

    async def _predecessor_gone(self) -> None:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        least_s = 0.0
        while item := await self._etcd.get(self._key):
            if read_host(self._host, item.value) is None:
                return  # no agent has written that
            left_s, granted_s = await self._etcd.time_left(item.lease)
            if deadline is None:
                deadline, least_s = loop.time() + min(granted_s, 60.0) + EXPIRY_S, left_s
                self._log("info", f"registered host {self._host}; waiting for confirmation")
            if left_s > least_s or loop.time() > deadline:  # somebody renews it
                raise Invalid(self._taken())
            least_s = left_s
            await asyncio.sleep(LOOK_S)

    def _taken(self) -> str:
        return f"host {self._host} already has an agent in this job: stop that one, or pass another name with --host"

    async def _claim(self, *, within_s: float | None = None) -> None:
        """See to it that the key is ours, or that we have ended."""
        async with self._claiming:
            while not self.ended.is_set():
                item = await self._etcd.get(self._key, within_s=within_s)
                if item is not None and self._is_ours(item):
                    return
                other = read_host(self._host, item.value) if item else None
                if other is not None and other.incarnation > self._record.incarnation:
                    self._end()
                    return
                if not self._lease:
                    self._lease = await self._etcd.grant(self._ttl_s, within_s=within_s)
                unchanged = Unchanged(self._key, item.changed if item else 0)
                put = Put(self._key, msgspec.json.encode(self._record), self._lease)
                try:
                    await self._etcd.transact([unchanged], [put], within_s=within_s)
                except LeaseGone:
                    self._lease = 0

    def _is_ours(self, item: Item) -> bool:
        return (
            bool(self._lease)
            and item.lease == self._lease
            and read_host(self._host, item.value) == self._record
        )

    def _end(self) -> None:
        self.why = f"a later agent has taken over host {self._host}; this one exits"
        self._log("error", self.why)
        self.ended.set()

    async def _keep(self) -> None:
        while not self.ended.is_set():
            await asyncio.sleep(self._ttl_s / 3)
            with contextlib.suppress(Unavailable):
                if not await self._etcd.keep_alive(self._lease, within_s=self._ttl_s):
                    self._log("info", f"the lease of host {self._host} expired; registered again")
                    await self._claim()

    async def _look(self) -> None:
        async with contextlib.aclosing(self._etcd.watch(self._key)) as looks:
            async for item in looks:
                if item is None or not self._is_ours(item):
                    await self._claim()
                if self.ended.is_set():
                    return

    async def _go_on(self, work: Callable[[], Awaitable[None]]) -> None:
        told = ""
        while not self.ended.is_set():
            try:
                await work()
                return
            except Unavailable:  # the connection was closed
                return
            except Rejected as error:
                if str(error) != told:
                    told = str(error)
                    self._log("error", f"etcd rejects host {self._host}: {told}; retrying")
                await asyncio.sleep(self._ttl_s)
