"""Election of the driver that leads a job, through etcd."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

from elastic.driver.etcd.leader_election import Leadership
from elastic.driver.job.multi_host_plan import MultiHostPlan
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid

SOON_S = 1.0  # seconds within which to acquire leadership if no driver leads
# seconds within which to acquire leadership after the lease of a killed driver has expired
LEFT_S = 4.0


class LeaderLease:
    """Acquired leadership of a job in etcd.

    Args:
        waited: whether this driver had to wait for another leader.
    """

    def __init__(self, etcd: Any, leadership: Leadership, *, waited: bool) -> None:
        self.etcd = etcd
        self.leadership = leadership
        self.waited = waited


async def campaign(
    plan: MultiHostPlan, log: Log, stack: contextlib.AsyncExitStack
) -> LeaderLease | str | None:
    """Become the leader of a job. Waits if this driver is a standby.

    Returns:
        The acquired leadership, None if the job does not use etcd, or the reason as a string if a signal ended the
        wait.

    Raises:
        Invalid: another driver leads, and this driver is not a standby.
    """
    if plan.etcd is None:
        return None
    from elastic.driver.etcd.client import EtcdClient

    etcd = EtcdClient(plan.etcd, log)
    await etcd.open()
    stack.push_async_callback(etcd.close)
    leadership = Leadership(etcd, plan.name, log)
    stack.push_async_callback(leadership.resign)
    taking = asyncio.ensure_future(leadership.acquire())
    done, _ = await asyncio.wait({taking}, timeout=SOON_S)
    if not done and not plan.standby:
        done, _ = await asyncio.wait({taking}, timeout=LEFT_S)
    waited = not done
    if waited and not plan.standby:
        taking.cancel()
        await asyncio.wait({taking})
        raise Invalid(
            f"another driver is running job {plan.name}: wait until that driver ends, use another --job name, or"
            " pass --standby to take over when it fails"
        )
    if waited:
        log("info", f"standby: another driver leads job {plan.name}")
        stopped = await _unless_stopped(taking)
        if stopped:
            return stopped
    taking.result()
    log("info", f"elected leader of job {plan.name}, term {leadership.term}")
    return LeaderLease(etcd, leadership, waited=waited)


async def _unless_stopped(taking: asyncio.Future[int]) -> str:
    """Wait for leadership. Return "" once acquired, or the reason if Ctrl-C or SIGTERM ends the wait."""
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def asked(name: str) -> None:
        if not stop.done():
            stop.set_result(f"{name} while on standby")

    aio = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        aio.add_signal_handler(number, asked, number.name)
    try:
        both: set[asyncio.Future[Any]] = {taking, stop}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            await asyncio.wait({taking})
            return stop.result()
        return ""
    finally:
        stop.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            aio.remove_signal_handler(number)
