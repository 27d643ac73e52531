"""A driver that only keeps its journal in Ray's store: JOB [forget]. It resumes from existing entries.

It tells what may be acted upon, as ``settled NUMBER DIGEST``. With ``forget`` it tells what is there, and removes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import zlib

import ray

from elastic.driver.etcd.leader_election import LeadershipLost
from elastic.driver.events import DriverRestarted, HostsChanged
from elastic.driver.journal.entries import Writer, header_of
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.ray.journal import RayArchive
from elastic.driver.settings import Settings


def say(*words: object) -> None:
    print(*words, flush=True)


def digest(membership: Membership) -> int:
    return zlib.crc32(take_snapshot(membership))


async def main(job: str, *task: str) -> None:
    settings = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
    archive = RayArchive(job, log=lambda level, text: say("log", level, text))
    past = await archive.past()
    found = 0 if past is None else round(past.last_at)
    term = 0 if past is None else past.term
    say("found", found, "term", term, "digest", 0 if past is None else digest(past.membership))
    if task == ("forget",):
        await archive.forget()
        past = await RayArchive(job).past()
        say("left", None if past is None else past.last_at)
        return
    membership = Membership(settings) if past is None else past.membership
    policy = SnapshotPolicy(take=lambda: take_snapshot(membership), snapshot_every=40)
    writer = Writer(term + 1, pid=os.getpid(), at=float(found))
    if past is None:
        journal = await archive.begin(header_of(settings, job=job, writer=writer), policy)
    else:
        journal = await archive.go_on(past, writer, policy)
        journal.record(found, DriverRestarted(), membership.handle(DriverRestarted(), found))
        await journal.settle()
    for number in range(found + 1, 10**9):
        event = HostsChanged({f"host-{n:04d}": 2 for n in range(number % 400)})
        journal.record(float(number), event, membership.handle(event, float(number)))
        try:
            await journal.settle()
            say("settled", number, digest(membership))
            await journal.rest()  # a snapshot is a record, too: another driver may exist by now
        except LeadershipLost:
            say("deposed", number)
            return


ray.init(logging_level=logging.ERROR, log_to_driver=False)
asyncio.run(main(*sys.argv[1:]))
