"""Name lookups outside the event loop, with a timeout.

Results are not cached, because they may change at any time.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from elastic.driver.network.blocking_calls import begun, over, within
from elastic.driver.network.host_lists import parse_address
from elastic.driver.network.interface_selection import is_link_local
from elastic.errors import Invalid

LOOKUP_S = 5.0
Found = list[tuple[int, str]]  # address family and numeric address, in order of preference

# Lookups in progress. Concurrent requests for the same name share a lookup, so that an unresponsive name server blocks
# only one thread per name.
_under_way: dict[tuple[str, int], Future[Found]] = {}
_starting = threading.Lock()


async def numeric(text: str) -> list[tuple[str, int]]:
    """Resolve ``host:port``, and return pairs of an address and the port.

    Raises:
        OSError: the host cannot be resolved. The message contains its name.
    """
    try:
        host, port = parse_address(text)
    except Invalid as error:  # The text may come from etcd, so it may be invalid.
        raise OSError(str(error)) from None
    return [(address, port) for _, address in await resolved(host, port, LOOKUP_S)]


async def resolved(
    name: str, port: int, timeout_s: float, *, ask: Callable[..., list[Any]] = socket.getaddrinfo
) -> Found:
    """Return all addresses of a name or numeric address, without duplicates.

    Raises:
        OSError: the name cannot be resolved. The message is a clause such as ``driver.lab could not be resolved: Name
            or service not known``.
    """
    with _starting:
        under_way = _under_way.get((name, port))
        if under_way is None:
            under_way = begun(partial(_looked_up, name, port, ask), f"resolve {name}")
            _under_way[name, port] = under_way
    try:
        await within(over(under_way), timeout_s)
    except asyncio.TimeoutError:
        raise OSError(
            f"{name} could not be resolved within {timeout_s:g} s: check the name server"
        ) from None
    return list(under_way.result())


def _looked_up(name: str, port: int, ask: Callable[..., list[Any]]) -> Found:
    try:
        rows = ask(name, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((int(row[0]), _numeric(row[4])) for row in rows))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(
            f"{name} could not be resolved: {reason}. Check the spelling and DNS"
        ) from None
    finally:
        # Remove the lookup before its result is set, so that later requests start a new one.
        with _starting:
            _under_way.pop((name, port), None)


def _numeric(sockaddr: tuple[Any, ...]) -> str:
    host = str(sockaddr[0])
    if len(sockaddr) == 4 and sockaddr[3] and "%" not in host and is_link_local(host):
        return f"{host}%{sockaddr[3]}"
    return host
