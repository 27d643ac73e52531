"""Asks the name server which pods stand behind a headless service: each of their addresses is a host.

A name server that fails, or knows no address, changes nothing: the last good list stays, and the trouble is reported
once, and once more when it is over. Kubernetes names pods that are ready, or, if the service says
``publishNotReadyAddresses: true``, all that run.

Of a service with both families each pod has an address of each, and would count twice. So the family of the first
answer is kept: IPv4, if it has any.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from elastic.driver.discovery.interface import Log
from elastic.driver.network.hosts import show
from elastic.driver.network.resolver import Found, resolved

INTERVAL_S = 5.0  # name servers of clusters keep an answer for 5 s by default
TIMEOUT_S = 5.0


class HeadlessServiceDiscovery:
    """Looks ``name`` up every ``interval_s`` seconds. Every address behind it is a host with ``slots`` slots.

    Hosts that stay keep their order, and those that come stand behind them.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        log: Log,
        *,
        resolve: Callable[[str, int, float], Awaitable[Found]] = resolved,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._name = name
        self._slots = slots
        self._log = log
        self._resolve = resolve
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._family: int | None = None

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        hosts: dict[str, int] = {}
        trouble = ""
        while True:
            try:
                addresses = await self._ask()
            except OSError as error:
                # One line for each kind of trouble, not one each time.
                if str(error) != trouble:
                    trouble = str(error)
                    kept = f"keeping {show(hosts)}" if hosts else "waiting for hosts"
                    self._log("warning", f"service {self._name}: {trouble}; {kept}")
            else:
                if trouble:
                    trouble = ""
                    self._log("info", f"service {self._name} was found again")
                if set(addresses) != set(hosts):
                    stay = [host for host in hosts if host in addresses]
                    come = [host for host in addresses if host not in hosts]
                    hosts = dict.fromkeys([*stay, *come], self._slots)
                    yield dict(hosts)
            await self._sleep(self._interval_s)

    async def _ask(self) -> list[str]:
        """In numerical order, as name servers shuffle them. Raises OSError where there is none."""
        found = await self._resolve(self._name, 0, self._timeout_s)
        families = {family for family, _ in found}
        if self._family is None and families:
            self._family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        addresses = {address for family, address in found if family == self._family}
        if not addresses:
            raise OSError("the name server returns no address")
        return sorted(addresses, key=ipaddress.ip_address)
