"""Whether the networks that several hosts have chosen fit together. Pure.

Networks that differ are no trouble by themselves, since there may be routers between them. They are one where all hosts
have another network in common; so are addresses that can't reach each other on the face of it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence

from elastic.driver.network.choose_address import FLAG, is_loopback

SHOWN = 6  # hosts that a sentence lists

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Agreement:
    """What each host uses and has, counted, so that a thousand hosts need not be compared with each other."""

    def __init__(self) -> None:
        self._hosts: dict[str, _CheckedHost] = {}
        self._told: set[str] = set()
        self._versions: Counter[int] = Counter()  # of what hosts use
        self._used: Counter[_Network] = Counter()
        # From where hosts that use this address call.
        self._callers: dict[_Address, Counter[str]] = {}
        # Hosts that use loopback; and though they call from elsewhere.
        self._inside = self._afar = 0
        self._having: Counter[_Network] = Counter()  # hosts
        self._held: dict[_Network, Counter[_Address]] = {}

    def note(self, host: str, bind: str, addresses: Sequence[str], calls_from: str = "") -> str:
        """A sentence if workers of the hosts can't reach each other, as it seems. Each kind of trouble is told once.

        ``bind`` is the numeric address that the host uses, ``addresses`` are all that it has, as in ``10.0.0.5/24``,
        ``calls_from`` is the one under which the driver knows it. What is not an address is taken for nothing.
        """
        self.drop(host)
        try:
            found = _CheckedHost(bind, addresses, calls_from)
        except ValueError:
            return ""
        self._hosts[host] = found
        self._count(found, 1)
        kind = self._trouble(found)
        if not kind or kind in self._told:
            return ""
        self._told.add(kind)
        return f"{self._told_of(kind, found)}: {self._cure(found)}"

    def drop(self, host: str) -> None:
        """It is gone."""
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
        """Which kind, if the newest host makes one."""
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

    def _told_of(self, kind: str, newest: _CheckedHost) -> str:
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

    def _cure(self, newest: _CheckedHost) -> str:
        common = self._common(newest)
        if common is not None:
            return f"pass {FLAG} {common}, which all of them have"
        return (
            f"pass {FLAG} with a network that all of them have, such as 10.0.0.0/8, or one for each, separated by"
            " commas"
        )

    def _common(self, newest: _CheckedHost) -> _Network | None:
        """A network in which every host has an address of its own, IPv4 first."""
        common = [
            network
            for network in newest.has
            if self._having[network] == len(self._hosts)
            # The same address on several hosts is a bridge inside of each.
            and max(self._held[network].values()) == 1
        ]
        return min(common, key=lambda network: (network.version, str(network)), default=None)

    def _shown(self, hosts: Iterable[_CheckedHost]) -> str:
        names = {id(each): name for name, each in self._hosts.items()}
        words = [f"{names[id(each)]} ({each.bind})" for each in hosts]
        more = [f"{len(words) - SHOWN} more"] if len(words) > SHOWN else []
        *first, last = [*words[:SHOWN], *more]
        return f"{', '.join(first)} and {last}" if first else last


class _CheckedHost:
    """Raises ValueError where a text is not an address."""

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
