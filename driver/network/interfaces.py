"""What addresses this machine has, and by which of them another is reached. Sends nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from elastic.driver.network.choose_address import (
    FLAG,
    Interface,
    bare,
    choose_bind,
    is_link_local,
    is_loopback,
    wanted_address,
    worker_variables,
)
from elastic.driver.network.resolver import LOOKUP_S, Found, resolved
from elastic.errors import Invalid

ASKED = 4  # hosts, until one shows the way
_OUTWARD = ("192.0.2.1", "2001:db8::1")  # of nobody: only the way there is asked for
_PORT = 9


def own_addresses() -> list[Interface]:
    """Every IPv4 and IPv6 address of this machine, loopback included, in the order of its interfaces."""
    import psutil  # takes a while, and only some jobs need it

    stats = psutil.net_if_stats()
    found = []
    for name, rows in psutil.net_if_addrs().items():
        up = name in stats and stats[name].isup
        for row in rows:
            if row.family in (socket.AF_INET, socket.AF_INET6):
                address = bare(row.address)
                length = _prefix_length(address, row.netmask)
                found.append(Interface(name, address, length, up, is_loopback(address)))
    return found


def alone_address(wanted: Sequence[str], own: Sequence[Interface] | None = None) -> str:
    """Where driver and workers of a job on this machine alone listen. Raises Invalid."""
    if not wanted:
        return "127.0.0.1"
    return wanted_address(wanted, own_addresses() if own is None else own)


def worker_network(bind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``environ`` for workers that listen on ``bind``; nothing that is set there is replaced."""
    return worker_variables(bind, own_addresses(), environ)


def route_to(address: str) -> str | None:
    """The address by which this machine would talk to another; None where there is no way there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # The zone of fe80::1%eth0 counts as a number of its own: in the text, connect overlooks it.
        found = socket.getaddrinfo(address, _PORT, family, flags=socket.AI_NUMERICHOST)
        probe.connect(found[0][4])  # sends nothing
        return bare(probe.getsockname()[0])
    return None


async def listen_address(
    wanted: Sequence[str],
    towards: Sequence[str],
    *,
    grows: bool = False,
    own: Sequence[Interface] | None = None,
    resolve: Callable[[str, int, float], Awaitable[Found]] = resolved,
    route: Callable[[str], str | None] = route_to,
) -> str:
    """The one address on which the driver of a job listens. Raises Invalid.

    ``towards`` are names or numeric addresses of the machines that will call: those of the other hosts, or of etcd,
    the important ones first. By default it is the address from which the first one is reached that is another machine;
    where no name means anything here (only ssh may know it), the address from which the rest of the world is. Without
    any, nobody but this machine is served, unless the job ``grows``: then hosts may come that nobody knows yet, and
    the rest of the world counts too, if there is a way there.
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
            f"no address of this machine leads to another host ({'; '.join(reasons)}): pass {FLAG}"
        )
    if is_link_local(local):
        return choose_bind((), [], local=local)  # which says why not
    return local


async def _towards(
    names: Sequence[str],
    resolve: Callable[[str, int, float], Awaitable[Found]],
    route: Callable[[str], str | None],
) -> tuple[str | None, list[str]]:
    """Our end of the way to the first that is another machine, else to one that is this; and why there is none."""
    here: str | None = None
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
                here = here or local
            else:
                return local, reasons
    return here, reasons


def _prefix_length(address: str, netmask: str | None) -> int:
    if not netmask:  # of a point-to-point link, say
        return ipaddress.ip_address(address).max_prefixlen
    return int(ipaddress.ip_address(netmask)).bit_count()


def free_port(address: str) -> int:
    """One that is free now; nothing keeps it so."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])
