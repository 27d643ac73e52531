"""Leader election between the drivers of a job, through a key in etcd.

The leader key is written under a lease. A driver that acquires the key increments the term of the job in the same
transaction. Its later writes are conditional on this term. A driver that was stopped or disconnected and then replaced
therefore cannot write when it continues. If a driver loses the key but no other driver has led since, it acquires the
key again with the same term.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from elastic.driver.etcd.client import EtcdClient, Item, Put, Unchanged
from elastic.driver.etcd.connection import LeaseExpired, Rejected, Unavailable
from elastic.driver.etcd.keys import LeaderRecord, job_root, read_leader, split_address
from elastic.driver.etcd.lease_guard import LeaseGuard
from elastic.driver.etcd.member_failover import Log
from elastic.errors import ElasticError, Invalid

# seconds after an etcd outage for which only the previous leader may acquire the key
RETAKE_S = 1.0


class LeadershipLost(ElasticError):
    """Error raised when another driver leads this job or this driver has resigned. All later writes fail as well."""


class Leadership:
    """Leadership of a job. ``lost`` is set when another driver leads. ``term`` is 0 until this driver leads.

    This driver leads until it calls `resign`, until this process ends, or until etcd could not be reached for ``ttl_s``
    seconds while another driver waits. Call `resign` before the connection to etcd is closed.
    """

    def __init__(self, etcd: EtcdClient, job: str, log: Log, *, ttl_s: float = 2.0) -> None:
        self.lost = asyncio.Event()
        self.term = 0
        self._etcd = etcd
        self._job = job
        self._seat = f"{job_root(job)}driver"
        self._term = f"{job_root(job)}term"
        self._log = log
        self._ttl_s = ttl_s
        self._record = LeaderRecord(0)
        # transaction condition that no other driver has led since this driver
        self._guard_condition: Unchanged | None = None
        self._resigned = False
        self._lease = 0
        self._seating = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._guard: LeaseGuard | None = None

    @property
    def leads(self) -> bool:
        """Return whether this driver considers itself the leader. Only a transaction can confirm this."""
        return self._guard_condition is not None and not self.lost.is_set()

    @property
    def guard_pid(self) -> int | None:
        return self._guard.pid if self._guard else None

    async def acquire(self) -> int:
        """Wait until no driver leads, become the leader, and return the new term.

        Raises LeadershipLost after `resign`.
        """
        if self._resigned:
            raise self._leadership_lost()
        self._guard = self._guard or LeaseGuard(self._etcd.access, self._log)
        campaign = asyncio.ensure_future(self._campaign())
        self._tasks += [campaign, asyncio.ensure_future(self._keep())]
        try:
            await asyncio.wait({campaign})
        except asyncio.CancelledError:
            campaign.cancel()
            raise
        if campaign.cancelled():
            raise self._leadership_lost()
        campaign.result()
        self._tasks.append(asyncio.ensure_future(self._look()))
        return self.term

    async def announce(self, address: str) -> None:
        """Publish this driver's address, ``host:port``. Raises LeadershipLost if another driver leads the job."""
        host, port = split_address(address)
        self._record = LeaderRecord(self.term, host, port)
        await self._sit(anew=True)
        if not self.leads:
            raise self._leadership_lost()

    async def transact(
        self, puts: Sequence[tuple[str, bytes]] = (), deletes: Sequence[str] = ()
    ) -> None:
        """Perform all operations if this driver leads, otherwise raise LeadershipLost. Waits while etcd is unavailable.

        The keys in the operations must include their prefix. etcd accepts at most 127 operations and 1.5 MB.
        """
        if not self.leads or self._guard_condition is None:
            raise self._leadership_lost()
        written = await self._etcd.transact(
            [self._guard_condition], [Put(*each) for each in puts], deletes, within_s=None
        )
        if written is None:
            self._depose()
            raise self._leadership_lost()

    async def resign(self) -> None:
        """Release the leadership, or stop waiting for it. Returns soon even if etcd does not respond."""
        self._resigned = True
        self._guard_condition = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._lease:
            # Revoke the lease, so that another driver need not wait until it expires.
            with contextlib.suppress(Unavailable, Rejected):
                await self._etcd.revoke(self._lease, within_s=2.0)
        if self._guard is not None:
            self._guard.close()

    # ---- the leader key

    async def _campaign(self) -> None:
        async with contextlib.aclosing(self._etcd.watch(self._seat)) as changes:
            async for item in changes:
                if item is not None and item.lease != self._lease:
                    continue
                while wait_s := self._etcd.unsettled_s(self._ttl_s + RETAKE_S):
                    await asyncio.sleep(wait_s)
                if await self._take():
                    return
        raise Unavailable("the connection to etcd was closed: see its log")

    async def _take(self) -> bool:
        while True:
            last = await self._etcd.get(self._term, within_s=None)
            try:
                term = int(last.value) + 1 if last else 1
            except ValueError:
                raise Invalid(
                    f"the etcd key {self._term} does not contain a number: check that job {self._job} is not"
                    " running, then delete the key"
                ) from None
            lease = await self._live_lease()
            record = LeaderRecord(term)
            conditions = [Unchanged(self._seat, 0), Unchanged(self._term, _changed(last))]
            puts = [
                Put(self._seat, msgspec.json.encode(record), lease),
                Put(self._term, str(term).encode()),
            ]
            try:
                revision = await self._etcd.transact(conditions, puts, within_s=None)
            except LeaseExpired:
                self._lease = 0
                continue
            if revision is None:
                seat = await self._etcd.get(self._seat, within_s=None)
                if seat is None:
                    continue
                taken = read_leader(seat.value)
                if seat.lease != lease or taken is None:
                    return False
                # An earlier transaction of this driver has succeeded, but its response was lost.
                record, revision = taken, seat.changed
            self.term, self._record = record.term, record
            self._guard_condition = Unchanged(self._term, revision)
            return True

    async def _sit(self, *, anew: bool = False) -> None:
        async with self._seating:
            while self.leads and self._guard_condition is not None:
                lease = await self._live_lease()
                seat = await self._etcd.get(self._seat, within_s=None)
                value = msgspec.json.encode(self._record)
                if seat is not None and seat.lease == lease and seat.value == value:
                    return
                # Write the key if it is missing or holds an older record of this driver. The transaction fails only if
                # the key has changed since it was read, or if another driver has led in the meantime.
                conditions = [self._guard_condition, Unchanged(self._seat, _changed(seat))]
                try:
                    if await self._etcd.transact(
                        conditions, [Put(self._seat, value, lease)], within_s=None
                    ):
                        if not anew:
                            self._log("info", f"elected leader of job {self._job} again")
                        return
                except LeaseExpired:
                    self._lease = 0
                    continue
                term = await self._etcd.get(self._term, within_s=None)
                if _changed(term) != self._guard_condition.changed:
                    self._depose()

    async def _live_lease(self) -> int:
        if not self._lease:
            self._lease = await self._etcd.grant(self._ttl_s, within_s=None)
            if self._guard is not None:
                self._guard.send_lease(self._lease)
        return self._lease

    async def _keep(self) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(self._ttl_s / 3)
            if not self._lease:
                continue
            with contextlib.suppress(Unavailable, Rejected):
                lease = self._lease
                if not await self._etcd.keep_alive(lease, within_s=self._ttl_s):
                    if self._lease == lease:
                        self._lease = 0
                    await self._sit()

    async def _look(self) -> None:
        async with contextlib.aclosing(self._etcd.watch(self._seat)) as changes:
            async for item in changes:
                record = read_leader(item.value) if item else None
                if record is None or record.term != self.term:
                    with contextlib.suppress(Unavailable, Rejected):
                        await self._sit()

    def _depose(self) -> None:
        if not self.lost.is_set():
            self.lost.set()
            self._log(
                "warning",
                f"another driver leads job {self._job} now, or etcd lost its data; this driver exits",
            )

    def _leadership_lost(self) -> LeadershipLost:
        return LeadershipLost(
            f"this driver no longer leads job {self._job}, so the write was rejected: see the log of the new driver"
        )


def _changed(item: Item | None) -> int:
    return item.changed if item else 0
