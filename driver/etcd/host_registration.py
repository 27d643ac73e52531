"""Registration of an agent's host in etcd, under a lease, and lookup of the driver.

The agent reacts to the state of the host's key:

- The key is missing: write it again, under a new lease if necessary.
- A newer agent of this host has written it: the newer agent has taken over, so this agent exits.
- An earlier agent has written it: overwrite it. At the start of this agent, however, wait until the lease of the
  earlier agent has expired, and exit if the earlier agent is still running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from elastic.driver.etcd.client import EtcdClient, Item, Put, Unchanged
from elastic.driver.etcd.connection import LeaseExpired, Rejected, Unavailable
from elastic.driver.etcd.keys import (
    HostRecord,
    LeaderAddress,
    check_host,
    check_slots,
    job_root,
    leader_of,
    read_host,
    read_leader,
)
from elastic.driver.etcd.member_failover import Log
from elastic.errors import Invalid

EXPIRY_S = 1.5  # seconds after the expiry of a lease within which etcd detects it
LOOK_S = 0.25  # seconds between checks of an earlier agent's lease


class Registration:
    """Registration of one host. Call `close` before the connection to etcd is closed.

    ``ended`` is set when a newer agent of the host has taken over. ``why`` then contains the reason to log.

    Args:
        etcd: client for etcd.
        job: name of the job.
        host: name of the host.
        slots: number of slots of the host.
        incarnation: incarnation of the host's agent, which increases with every start.
        log: called with the level and the text of each log line.
        ttl_s: time to live of the lease, in seconds.
    """

    def __init__(
        self,
        etcd: EtcdClient,
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
        """Register the host. If an earlier agent has died, wait until its lease has expired.

        Raises:
            Invalid: another live agent serves this host.
            Unavailable: etcd cannot be reached.
        """
        await self._predecessor_ended()
        await self._claim(within_s=5.0)
        if self.ended.is_set():
            raise Invalid(self._taken())
        self._tasks = [
            asyncio.ensure_future(self._go_on(each)) for each in (self._keep, self._look)
        ]

    async def close(self) -> None:
        """Remove the host from the list of hosts."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._lease:
            # Revoke the lease, because it would otherwise keep the host listed until it expires.
            with contextlib.suppress(Unavailable, Rejected):
                await self._etcd.revoke(self._lease, within_s=2.0)

    async def watch_driver(self) -> AsyncGenerator[LeaderAddress | None, None]:
        """Yield the driver's address and term, now and after each change.

        None means that no driver leads or that its address is unknown.
        """
        last: LeaderAddress | None = None
        first = True
        async with contextlib.aclosing(self._etcd.watch(f"{self._root}driver")) as changes:
            async for item in changes:
                seat = leader_of(read_leader(item.value) if item else None)
                if first or seat != last:
                    first, last = False, seat
                    yield seat

    async def _predecessor_ended(self) -> None:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        least_s = 0.0
        while item := await self._etcd.get(self._key):
            if read_host(self._host, item.value) is None:
                return  # not the value of an agent, so do not wait
            left_s, granted_s = await self._etcd.time_left(item.lease)
            if deadline is None:
                deadline, least_s = loop.time() + min(granted_s, 60.0) + EXPIRY_S, left_s
                self._log(
                    "info",
                    f"host {self._host} has an earlier registration; waiting for its lease to expire",
                )
            # The remaining time has increased, so another agent is still running and renews the lease.
            if left_s > least_s or loop.time() > deadline:
                raise Invalid(self._taken())
            least_s = left_s
            await asyncio.sleep(LOOK_S)

    def _taken(self) -> str:
        return f"host {self._host} already has an agent in this job: stop that agent, or pass another name with --host"

    async def _claim(self, *, within_s: float | None = None) -> None:
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
                except LeaseExpired:
                    self._lease = 0

    def _is_ours(self, item: Item) -> bool:
        return (
            bool(self._lease)
            and item.lease == self._lease
            and read_host(self._host, item.value) == self._record
        )

    def _end(self) -> None:
        self.why = f"a newer agent registered host {self._host}; this agent exits"
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
        async with contextlib.aclosing(self._etcd.watch(self._key)) as changes:
            async for item in changes:
                if item is None or not self._is_ours(item):
                    await self._claim()
                if self.ended.is_set():
                    return

    async def _go_on(self, work: Callable[[], Awaitable[None]]) -> None:
        last_error = ""
        while not self.ended.is_set():
            try:
                await work()
                return
            except Unavailable:  # the connection to etcd was closed
                return
            except Rejected as error:
                if str(error) != last_error:
                    last_error = str(error)
                    self._log("error", f"etcd rejects host {self._host}: {last_error}; retrying")
                await asyncio.sleep(self._ttl_s)
