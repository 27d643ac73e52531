"""Lookup of the address of a job's operator service in etcd. Makes no decisions."""

from __future__ import annotations

import asyncio

from elastic.driver.etcd.client import EtcdClient
from elastic.driver.etcd.connection import Unavailable
from elastic.driver.etcd.keys import job_root, operators_key, read_leader
from elastic.driver.network.credentials import EtcdAccess
from elastic.errors import Invalid

WITHIN_S = 5.0


def desk_of(access: EtcdAccess, job: str) -> str:
    """Return the address ``host:port`` of a job's operator service.

    Raises:
        Invalid: no driver leads the job, or etcd does not respond.
    """
    return asyncio.run(_desk_of(access, job))


async def _desk_of(access: EtcdAccess, job: str) -> str:
    etcd = EtcdClient(access, lambda level, text: None, root=job_root(job))
    try:
        await etcd.open()
        seat = await etcd.get(f"{job_root(job)}driver", within_s=WITHIN_S)
        desk = await etcd.get(operators_key(job), within_s=WITHIN_S)
    except Unavailable as error:
        where = ", ".join(access.endpoints)
        raise Invalid(f"etcd at {where} does not respond: {error}. Check --etcd") from None
    finally:
        await etcd.close()
    if seat is None or read_leader(seat.value) is None or desk is None:
        raise Invalid(
            f"no driver is running job {job} in this etcd: see elasticrun jobs for the jobs on this machine"
        )
    return desk.value.decode("ascii", errors="replace")
