"""A driver that only writes its journal: FILE. It resumes from existing entries, and prints commands that may run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from elastic.driver.events import DriverRestarted, HostsChanged
from elastic.driver.journal.entries import header_of
from elastic.driver.journal.file_journal import FileArchive
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.journal.resume import writer_here
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.settings import Settings


async def main(path: Path) -> None:
    settings = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
    archive = FileArchive(path)
    past = await archive.past()
    membership = past.membership if past is not None else Membership(settings)
    policy = SnapshotPolicy(take=lambda: take_snapshot(membership), snapshot_every=7)
    if past is None:
        journal = await archive.begin(header_of(settings, job="a1", writer=writer_here()), policy)
        now, term = 0.0, 1
    else:
        now, term = past.last_at, past.term + 1
        journal = await archive.go_on(past, writer_here(term=term, past=past), policy)
        journal.record(now, DriverRestarted(), membership.handle(DriverRestarted(), now))
    print(f"term {term}", flush=True)
    for number in range(10**9):
        now += 0.001
        event = HostsChanged({f"host-{n:04d}": 2 for n in range(number % 400)})
        journal.record(now, event, membership.handle(event, now))
        await journal.settle()
        print(number, flush=True)
        await journal.rest()


asyncio.run(main(Path(sys.argv[1])))
