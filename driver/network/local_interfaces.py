"""Queries of this machine's addresses and of its routes to other machines. They send no packets."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from elastic.driver.network.interface_selection import (
    FLAG,
    InterfaceAddress,
    bare,
    choose_bind,
    is_link_local,
    is_loopback,
    wanted_address,
    worker_variables,
)
from elastic.driver.network.name_lookup import LOOKUP_S, Found, resolved
from elastic.errors import Invalid

ASKED = 4  # maximum number of hosts to which a route is looked up
# Addresses reserved for documentation, used to look up the route to other networks. No packet is sent to them.
_OUTWARD = ("192.0.2.1", "2001:db8::1")
_PORT = 9


def own_addresses() -> list[InterfaceAddress]:
    """Return all IPv4 and IPv6 addresses of this machine, including loopback, in the order of its interfaces."""
    import psutil  # imported on demand, because the import is slow and few jobs need it

    stats = psutil.net_if_stats()
    found = []
    for name, rows in psutil.net_if_addrs().items():
        up = name in stats and stats[name].isup
        for row in rows:
            if row.family in (socket.AF_INET, socket.AF_INET6):
                address = bare(row.address)
                length = _prefix_length(address, row.netmask)
                found.append(InterfaceAddress(name, address, length, up, is_loopback(address)))
    return found


def alone_address(wanted: Sequence[str], own: Sequence[InterfaceAddress] | None = None) -> str:
    """Return the address that the driver and the workers of a single-machine job use.

    Raises:
        Invalid: this machine has none of the ``wanted`` interfaces, networks and addresses.
    """
    if not wanted:
        return "127.0.0.1"
    return wanted_address(wanted, own_addresses() if own is None else own)


def worker_network(bind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which workers use the network interface of the address ``bind``.

    Variables that ``environ`` already contains are omitted.
    """
    return worker_variables(bind, own_addresses(), environ)


def route_to(address: str) -> str | None:
    """Return the local address that is used to reach another machine, or None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # connect() requires the scope of an address such as fe80::1%eth0 as a number.
        found = socket.getaddrinfo(address, _PORT, family, flags=socket.AI_NUMERICHOST)
        probe.connect(found[0][4])  # connect() on a UDP socket sends no packet.
        return bare(probe.getsockname()[0])
    return None


async def listen_address(
    wanted: Sequence[str],
    towards: Sequence[str],
    *,
    grows: bool = False,
    own: Sequence[InterfaceAddress] | None = None,
    resolve: Callable[[str, int, float], Awaitable[Found]] = resolved,
    route: Callable[[str], str | None] = route_to,
) -> str:
    """Return the address on which the driver of a job should listen.

    By default, this is the local address on the route to the first of ``towards`` that is another machine. If no name
    can be resolved, for example because all of them are aliases known only to ssh, it is the local address on the route
    to other networks. If ``towards`` is empty, it is a loopback address or, if ``grows`` is True and a route to other
    networks exists, the local address on that route.

    Args:
        wanted: value of --network-interface.
        towards: names or numeric addresses of the machines that will connect, or of etcd, in order of importance.
        grows: whether hosts may be added later.
        own: addresses of this machine (default: read from the system).
        resolve: function that resolves a name.
        route: function that returns the local address on the route to an address, such as `route_to`.

    Raises:
        Invalid: this machine has no address that ``wanted`` selects, or no route to another host.
    """
    if not towards and (wanted or not grows):
        return alone_address(wanted, own)
    local, reasons = await _towards(towards, resolve, route)
    if wanted:
        family = ipaddress.ip_address(local).version if local else 4
        return wanted_address(wanted, own_addresses() if own is None else own, family=family)
    if local is None:
        outward = (route(each) for each in _OUTWARD)
        local = next((each for each in outward if each and not is_loopback(each)), None)
    if not towards and (local is None or is_link_local(local)):
        return alone_address(wanted, own)
    if local is None:
        raise Invalid(
            f"no address of this machine has a route to another host ({'; '.join(reasons)}): pass {FLAG}"
        )
    if is_link_local(local):
        return choose_bind((), [], local=local)  # Always raises an error that explains the reason.
    return local


async def _towards(
    names: Sequence[str],
    resolve: Callable[[str, int, float], Awaitable[Found]],
    route: Callable[[str], str | None],
) -> tuple[str | None, list[str]]:
    """Find the first of several names to which this machine has a route.

    Names of other machines are preferred to names of this machine.

    Returns:
        The local address on the route, or None, and a clause for each name or address without a route.
    """
    fallback: str | None = None
    reasons: list[str] = []
    for name in names[:ASKED]:
        try:
            found = await resolve(name, _PORT, LOOKUP_S)
        except OSError as error:
            reasons.append(str(error))
            continue
        for _, address in found:
            local = route(address)
            if local is None:
                reasons.append(f"no route to {address}")
            elif is_loopback(local):
                fallback = fallback or local
            else:
                return local, reasons
    return fallback, reasons


def _prefix_length(address: str, netmask: str | None) -> int:
    if not netmask:  # Some addresses, such as those of point-to-point links, have no netmask.
        return ipaddress.ip_address(address).max_prefixlen
    return int(ipaddress.ip_address(netmask)).bit_count()


def free_port(address: str) -> int:
    """Return a port that is currently free. The port is not reserved, so another process may bind it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])
