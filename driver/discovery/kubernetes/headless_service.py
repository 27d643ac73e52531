"""Discovery of the pods behind a headless service through DNS: each pod's address is a host.

If the name server fails or returns no address, the last valid list is kept. The failure and its end are logged once.
Kubernetes returns the ready pods, or all running pods if the service has ``publishNotReadyAddresses: true``.

In a dual-stack service, each pod has two addresses and would count twice. Therefore only one address family is used:
IPv4 if the first answer contains an IPv4 address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from elastic.driver.discovery.interface import Log
from elastic.driver.network.host_lists import show
from elastic.driver.network.name_lookup import Found, resolved

# Default interval, in seconds: cluster name servers cache an answer for 5 s by default.
INTERVAL_S = 5.0
TIMEOUT_S = 5.0


class HeadlessServiceDiscovery:
    """Discovery that resolves ``name`` every ``interval_s`` seconds.

    Each address in the answer is a host with ``slots`` slots. Known hosts keep their order, and new hosts are appended.
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
                # Log only one line for each kind of failure.
                if str(error) != trouble:
                    trouble = str(error)
                    kept = f"keeping {show(hosts)}" if hosts else "waiting for hosts"
                    self._log("warning", f"service {self._name}: {trouble}; {kept}")
            else:
                if trouble:
                    trouble = ""
                    self._log("info", f"service {self._name} was found again")
                if set(addresses) != set(hosts):
                    existing = [host for host in hosts if host in addresses]
                    new = [host for host in addresses if host not in hosts]
                    hosts = dict.fromkeys([*existing, *new], self._slots)
                    yield dict(hosts)
            await self._sleep(self._interval_s)

    async def _ask(self) -> list[str]:
        """Return the addresses in numerical order, because name servers shuffle them.

        Raises:
            OSError: the name server failed, or returned no address.
        """
        found = await self._resolve(self._name, 0, self._timeout_s)
        families = {family for family, _ in found}
        if self._family is None and families:
            self._family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        addresses = {address for family, address in found if family == self._family}
        if not addresses:
            raise OSError(
                "the name server returned no address: check that the service has ready pods"
            )
        return sorted(addresses, key=ipaddress.ip_address)
