"""Discovery of the hosts whose agents are registered in etcd, updated through a watch. Makes no decisions.

The discovery watches the keys of `driver/etcd/host_registration.py`. Hosts are listed in the order of their
registration.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

from elastic.driver.discovery.interface import Log
from elastic.driver.etcd.client import Item
from elastic.driver.etcd.keys import job_root, read_host


class Watched(Protocol):
    """Interface of `elastic.driver.etcd.client.EtcdClient` that this module needs."""

    def watch_prefix(self, prefix: str) -> AsyncGenerator[dict[str, Item], None]: ...

    def unsettled_s(self, settle_s: float) -> float: ...


class EtcdDiscovery:
    """Discovery of the hosts under the job's ``hosts/`` prefix in etcd.

    No host is removed until ``settle_s`` seconds after an outage of etcd. During the outage, leases could not be
    renewed and may have expired, and the agents need some time to write their keys again.
    """

    def __init__(self, etcd: Watched, job: str, log: Log, *, settle_s: float = 6.0) -> None:
        self._etcd = etcd
        self._prefix = f"{job_root(job)}hosts/"
        self._log = log
        self._settle_s = settle_s
        self._reported: set[tuple[str, bytes]] = set()

    async def watch(self) -> AsyncGenerator[dict[str, int], None]:
        last: list[tuple[str, int]] | None = None
        kept: dict[str, Item] = {}
        async with contextlib.aclosing(self._etcd.watch_prefix(self._prefix)) as tables:
            pending: asyncio.Task[dict[str, Item]] | None = None
            try:
                now: dict[str, Item] = {}
                while True:
                    pending = pending or asyncio.ensure_future(_next(tables))
                    wait_s = self._etcd.unsettled_s(self._settle_s)
                    missing = kept.keys() - now.keys()
                    done, _ = await asyncio.wait(
                        {pending}, timeout=wait_s if missing and wait_s else None
                    )
                    if done:
                        try:
                            now = pending.result()
                        except StopAsyncIteration:
                            return
                        finally:
                            pending = None
                    # Query again, because the listing may have shown that etcd is available again after an outage.
                    settling = self._etcd.unsettled_s(self._settle_s) > 0
                    kept = {**kept, **now} if settling else dict(now)
                    hosts = self._in_order(kept)
                    if list(hosts.items()) != last:
                        last = list(hosts.items())
                        yield hosts
            finally:
                if pending is not None:
                    pending.cancel()
                    await asyncio.wait({pending})

    def _in_order(self, items: dict[str, Item]) -> dict[str, int]:
        hosts: dict[str, int] = {}
        for key, item in sorted(items.items(), key=lambda each: (each[1].created, each[0])):
            name = key.removeprefix(self._prefix)
            record = read_host(name, item.value)
            if record is not None:
                hosts[name] = record.slots
            elif (key, item.value) not in self._reported:
                self._reported.add((key, item.value))
                self._log("warning", f"etcd key {key} skipped: it does not describe a host")
        return hosts


async def _next(tables: AsyncGenerator[dict[str, Item], None]) -> dict[str, Item]:
    return await anext(tables)
