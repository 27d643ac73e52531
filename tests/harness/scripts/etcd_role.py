"""One part of a job as a separate process, to be stopped and killed: ``leader`` or ``agent``, then job and ttl.

How etcd is reached comes as one line on standard input. It says what it is on standard output, one line each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from itertools import count

import msgspec

from elastic.driver.etcd.client import EtcdClient
from elastic.driver.etcd.host_registration import Registration
from elastic.driver.etcd.leader_election import Leadership, LeadershipLost
from elastic.driver.network.credentials import EtcdAccess


async def lead(etcd: EtcdClient, job: str, ttl_s: float) -> None:
    """Lead, and write continuously while leading."""
    leadership = Leadership(etcd, job, quiet, ttl_s=ttl_s)
    term = await leadership.acquire()
    guard = leadership.guard_pid
    print("leads", term, guard, flush=True)
    try:
        for number in count():
            key = f"/hvd-elastic/{job}/log/{term}-{number}"
            await leadership.transact([(key, str(term).encode())], [])
            await asyncio.sleep(0.01)
    except LeadershipLost:
        print("deposed", leadership.leads, flush=True)
    await leadership.resign()


async def serve(etcd: EtcdClient, job: str, ttl_s: float) -> None:
    """Register as host ``a`` until a later one takes over."""
    registration = Registration(etcd, job, "a", 2, time.time_ns(), quiet, ttl_s=ttl_s)
    await registration.open()
    print("registered", flush=True)
    await registration.ended.wait()
    print("ended", registration.why, flush=True)
    await registration.close()


def quiet(level: str, text: str) -> None:
    if level in ("warning", "error"):
        print(f"{os.getpid()} {level}: {text}", file=sys.stderr, flush=True)


async def main() -> None:
    role, job, ttl_s = sys.argv[1:]
    access = msgspec.json.decode(sys.stdin.buffer.readline(), type=EtcdAccess)
    etcd = EtcdClient(access, quiet)
    await etcd.open()
    await {"leader": lead, "agent": serve}[role](etcd, job, float(ttl_s))
    await etcd.close()


if __name__ == "__main__":
    asyncio.run(main())
