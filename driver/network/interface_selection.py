"""Selection of the address that the workers of a host use. Pure: no I/O, no clock.

``wanted`` is the value of --network-interface: interface names, networks such as 10.0.0.0/8 or fd00::/8, or addresses.
Each host uses the first entry that matches one of its addresses. Two kinds of addresses are never selected: addresses
of interfaces that are down, and link-local IPv6 addresses, because they need a scope (interface number), which differs
between machines.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from elastic.errors import Invalid

FLAG = "--network-interface"
SHOWN = 6  # maximum number of addresses listed in a sentence

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAME = re.compile(r"[^\s/%]{1,15}")  # interface names that Linux allows
# Interfaces of containers and virtual machines. They do not reach other machines.
_INNER = ("docker", "br-", "virbr", "veth", "cni", "cbr", "flannel", "cali", "lxc", "lxd", "podman")


class InterfaceAddress(msgspec.Struct, frozen=True):
    """Address of a network interface of this machine. An interface with several addresses has one object for each."""

    name: str
    address: str  # numeric address, without a scope
    prefix_length: int
    up: bool
    loopback: bool  # whether the address is reachable only from this machine

    @property
    def network(self) -> str:
        """Network of the address, such as ``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix_length}", strict=False))

    @property
    def link_local(self) -> bool:
        """Whether the address is a link-local IPv6 address, which needs a scope.

        False for IPv4, whose link-local addresses work without a scope.
        """
        address = ipaddress.ip_address(self.address)
        return address.version == 6 and address.is_link_local

    def __str__(self) -> str:
        return f"{self.name} {self.address}/{self.prefix_length}{'' if self.up else ' (down)'}"


def check_wanted(wanted: Iterable[str]) -> None:
    """Raise Invalid if an entry is not the name of an interface, a network or an address."""
    for name in wanted:
        _network(name)


def choose_bind(
    wanted: Sequence[str], own: Sequence[InterfaceAddress], *, local: str, several: bool = False
) -> str:
    """Return the numeric address on which the workers of this host should listen.

    Args:
        wanted: value of --network-interface.
        own: addresses of this machine.
        local: address of this host in its connection to the driver. It is the default. If a wanted interface has
            addresses of both families, it also determines the family.
        several: whether other machines are known to take part. If so, loopback is excluded, even if the driver is
            reached over loopback through a tunnel. Otherwise, a driver that is reached over loopback means that all
            hosts are on one machine.

    Raises:
        Invalid: this machine has no address that ``wanted`` selects, or only addresses that other hosts cannot reach.
    """
    family = ipaddress.ip_address(bare(local)).version
    if wanted:
        return wanted_address(wanted, own, family=family)
    local = bare(local)
    if is_loopback(local) and several:
        return _reachable(own, family)
    if is_link_local(local):
        raise Invalid(_no_scope(local))
    return local


def wanted_address(
    wanted: Sequence[str], own: Sequence[InterfaceAddress], *, family: int = 4
) -> str:
    """Return the first address of this machine that ``wanted`` selects, preferably of ``family`` (4 or 6).

    Raises:
        Invalid: no entry matches, or all matching addresses are link-local IPv6 addresses.
    """
    scoped: InterfaceAddress | None = None
    for name in wanted:
        network = _network(name)
        found = [each for each in own if each.up and _fits(each, name, network)]
        scoped = scoped or next((each for each in found if each.link_local), None)
        usable = [each for each in found if not each.link_local]
        if usable:
            return min(usable, key=lambda each: _version(each.address) != family).address
    if scoped is not None:
        raise Invalid(_no_scope(f"{scoped.address} of {scoped.name}"))
    here = ", ".join(map(str, own[:SHOWN])) or "none"
    raise Invalid(
        f"{FLAG} {','.join(wanted)} matches no address of this machine: pass one of its interfaces or networks ({here})"
    )


def name_of(address: str, own: Sequence[InterfaceAddress]) -> str | None:
    """Return the name of the interface that has this address, or None.

    Any address in a loopback network, such as 127.0.0.2, belongs to the interface of that network.
    """
    for each in own:
        if each.address == address:
            return each.name
    found = ipaddress.ip_address(address)
    inside = (each.name for each in own if found in ipaddress.ip_network(each.network))
    return next(inside, None) if found.is_loopback else None


def worker_variables(
    bind: str, own: Sequence[InterfaceAddress], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return environment variables that make NCCL, torch's Gloo and Horovod scripts use the interface of an address.

    Variables in ``environ`` were set by the user and keep their values.
    """
    name = name_of(bind, own)
    if name is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": name, "HOROVOD_GLOO_IFACE": name}
    if "NCCL_SOCKET_IFNAME" not in environ:
        # Without the equals sign, NCCL would treat eth1 as a prefix, which also matches eth10.
        variables["NCCL_SOCKET_IFNAME"] = f"={name}"
        if ":" in bind:  # On an interface with both address families, NCCL would use IPv4.
            variables["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {name: value for name, value in variables.items() if name not in environ}


# ---- addresses -------------------------------------------------------------------------------------------------------


def bare(address: str) -> str:
    """Return the address without its scope. An IPv4-mapped IPv6 address is converted to IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(bare(address)).is_loopback


def is_link_local(address: str) -> bool:
    """Return whether an address is a link-local IPv6 address, which other machines cannot use without a scope."""
    found = ipaddress.ip_address(bare(address))
    return found.version == 6 and found.is_link_local


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _network(name: str) -> _Network | None:
    """Parse a network such as ``10.0.0.0/8``, or an address. Return None if the text is an interface name.

    Raises:
        Invalid: the text is none of these.
    """
    try:
        if "%" not in name:
            return ipaddress.ip_network(name, strict=False)
    except ValueError:
        if _NAME.fullmatch(name) and not re.fullmatch(r"[\d.]+|[\da-fA-F:]*::[\da-fA-F:]*", name):
            return None
    raise Invalid(
        f"{FLAG} {name!r} is neither an interface nor a network: pass a value such as eth1, 10.0.0.0/8 or"
        " fd00::/8"
    )


def _fits(interface: InterfaceAddress, name: str, network: _Network | None) -> bool:
    if network is None:
        return interface.name == name
    return ipaddress.ip_address(interface.address) in network


def _reachable(own: Sequence[InterfaceAddress], family: int) -> str:
    found = [each for each in own if each.up and not each.loopback and not each.link_local]
    if not found:
        raise Invalid(
            "this host has only loopback addresses, which other hosts can't reach: bring a network interface up,"
            f" or pass {FLAG}"
        )

    def rank(each: InterfaceAddress) -> tuple[bool, bool, bool]:
        found = ipaddress.ip_address(each.address)
        return each.name.startswith(_INNER), found.is_link_local, found.version != family

    return min(found, key=rank).address


def _no_scope(address: str) -> str:
    return (
        f"{address} is a link-local IPv6 address, which other hosts can't use: assign a global or private one"
        f" (fd00::/8) to the interface, or select another with {FLAG}"
    )
