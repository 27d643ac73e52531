"""Detection of hosts that cannot reach each other, judging by their addresses. Pure: no I/O, no clock.

Addresses on different networks are not necessarily an error, because routers may connect them. Such addresses are
reported only if all hosts share another network. Addresses that obviously cannot reach each other are always reported.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence

from elastic.driver.network.interface_selection import FLAG, is_loopback

SHOWN = 6  # maximum number of hosts listed in a sentence

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressCheck:
    """Checker of the addresses of all hosts. It stores counts, so that hosts need not be compared in pairs."""

    def __init__(self) -> None:
        self._hosts: dict[str, _CheckedHost] = {}
        self._reported: set[str] = set()
        self._versions: Counter[int] = Counter()  # number of hosts that use each IP version
        self._used: Counter[_Network] = Counter()
        # For each bind address, the addresses from which its hosts connect to the driver.
        self._callers: dict[_Address, Counter[str]] = {}
        # number of hosts that use loopback addresses, and number of hosts that connect from another machine
        self._inside = self._afar = 0
        # number of hosts with an address in each network
        self._having: Counter[_Network] = Counter()
        self._held: dict[_Network, Counter[_Address]] = {}

    def note(self, host: str, bind: str, addresses: Sequence[str], calls_from: str = "") -> str:
        """Add the addresses of a host. Invalid addresses are ignored.

        Args:
            host: name of the host.
            bind: numeric address that the host's workers use.
            addresses: all addresses of the host with prefix lengths, such as ``10.0.0.5/24``.
            calls_from: address from which the host connects to the driver.

        Returns:
            A warning if workers on the hosts apparently cannot reach each other, otherwise an empty string. Each kind
            of warning is returned only once.
        """
        self.drop(host)
        try:
            found = _CheckedHost(bind, addresses, calls_from)
        except ValueError:
            return ""
        self._hosts[host] = found
        self._count(found, 1)
        kind = self._trouble(found)
        if not kind or kind in self._reported:
            return ""
        self._reported.add(kind)
        return f"{self._describe(kind, found)}: {self._remedy(found)}"

    def drop(self, host: str) -> None:
        """Remove a host."""
        found = self._hosts.pop(host, None)
        if found is not None:
            self._count(found, -1)

    def _count(self, host: _CheckedHost, by: int) -> None:
        self._versions[host.bind.version] += by
        self._used[host.network] += by
        self._callers.setdefault(host.bind, Counter())[host.calls_from] += by
        self._inside += by * host.inside
        self._afar += by * host.afar
        self._having.update(dict.fromkeys(host.has, by))
        for network, held in host.has.items():
            self._held.setdefault(network, Counter()).update(dict.fromkeys(held, by))

    def _trouble(self, newest: _CheckedHost) -> str:
        if len(self._hosts) < 2:
            return ""
        if self._versions[4] and self._versions[6]:
            return "families"
        if self._inside and (self._inside < len(self._hosts) or self._afar):
            return "loopback"
        callers = self._callers[newest.bind]
        apart = sum(1 for caller, hosts in callers.items() if caller and hosts > 0) > 1
        if apart and not newest.inside:
            return "twice"
        if self._used[newest.network] < len(self._hosts) and self._common(newest) is not None:
            return "networks"
        return ""

    def _describe(self, kind: str, newest: _CheckedHost) -> str:
        match kind:
            case "families":
                old = self._shown(h for h in self._hosts.values() if h.bind.version == 4)
                new = self._shown(h for h in self._hosts.values() if h.bind.version == 6)
                return f"workers on {old} listen in IPv4 and those on {new} in IPv6, so they can't reach each other"
            case "loopback":
                inside = self._shown(h for h in self._hosts.values() if h.inside)
                return f"workers on {inside} listen on loopback, where no other host reaches them"
            case "twice":
                same = self._shown(h for h in self._hosts.values() if h.bind == newest.bind)
                return f"workers on {same} listen on the same address, although they are on different hosts"
            case _:
                return (
                    f"workers on {self._shown(self._hosts.values())} listen in different networks"
                )

    def _remedy(self, newest: _CheckedHost) -> str:
        common = self._common(newest)
        if common is not None:
            return f"pass {FLAG} {common}, which all hosts have"
        return (
            f"pass {FLAG} with a network that all hosts have, such as 10.0.0.0/8, or with one "
            "network per host, separated by commas"
        )

    def _common(self, newest: _CheckedHost) -> _Network | None:
        common = [
            network
            for network in newest.has
            if self._having[network] == len(self._hosts)
            # An address that several hosts have belongs to a virtual bridge inside each host.
            and max(self._held[network].values()) == 1
        ]
        return min(common, key=lambda network: (network.version, str(network)), default=None)

    def _shown(self, hosts: Iterable[_CheckedHost]) -> str:
        names = {id(each): name for name, each in self._hosts.items()}
        entries = [f"{names[id(each)]} ({each.bind})" for each in hosts]
        more = [f"{len(entries) - SHOWN} more"] if len(entries) > SHOWN else []
        *first, last = [*entries[:SHOWN], *more]
        return f"{', '.join(first)} and {last}" if first else last


class _CheckedHost:
    def __init__(self, bind: str, addresses: Sequence[str], calls_from: str) -> None:
        self.bind: _Address = ipaddress.ip_address(bind)
        self.calls_from = calls_from
        self.inside = self.bind.is_loopback
        self.afar = self.inside and bool(calls_from) and not is_loopback(calls_from)
        self.network: _Network = ipaddress.ip_network(bind)
        self.has: dict[_Network, set[_Address]] = {}
        for each in map(ipaddress.ip_interface, addresses):
            if each.ip == self.bind:
                self.network = each.network
            if not (each.ip.is_loopback or each.ip.is_link_local):
                self.has.setdefault(each.network, set()).add(each.ip)
