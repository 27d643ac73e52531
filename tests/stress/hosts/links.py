"""Packet loss, rates and delays of the links of hosts, expressed for nftables and tc. Pure.

A link has two ends: the host's own, and a port of the switch to which all hosts are connected. Packets are dropped at
the switch, where neither end detects it. They are delayed in both directions, each at its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import Invalid

TABLE = "bridge elastic_chaos"
PARTS = 10_000  # resolution of a packet loss rate
LATENCY = "latency 400ms"  # maximum delay in the queue of a slow link, as in an ordinary router
BURST_BYTES = 4_000  # minimum burst
# ... and its duration on a fast link: timers are no finer, and packets are sent in bursts
BURST_S = 0.004

_NAME = re.compile(r"[a-z][a-z0-9-]{0,11}")  # "port-" and this must fit into 15 characters
_RATE = re.compile(r"[1-9][0-9]*(k|m|g)bit")


@dataclass(frozen=True)
class Link:
    """Link of one host. The default is intact. ``from_host``, ``to_host``: whether packets pass in that direction."""

    from_host: bool = True
    to_host: bool = True
    loss: float = 0.0  # share of dropped packets, in either direction
    rate: str = ""  # rate in tc's format, such as 10mbit; empty: unlimited
    delay_s: float = 0.0  # each way

    def __post_init__(self) -> None:
        if not 0.0 <= self.loss < 1.0:
            raise Invalid(f"a loss of {self.loss:g} is not a share of packets: pass 0 <= loss < 1")
        if self.rate and not _RATE.fullmatch(self.rate):
            raise Invalid(f"{self.rate!r} is not a rate: pass one such as 10mbit")
        if self.delay_s < 0:
            raise Invalid(f"a delay of {self.delay_s:g} s is negative: pass 0 or more")


def check_name(host: str) -> str:
    if not _NAME.fullmatch(host):
        raise Invalid(f"{host!r} is not a name of a host: pass up to 12 of a-z, 0-9 and -")
    return host


def port(host: str) -> str:
    """Return the switch's interface to which a host is connected."""
    return f"p-{host}"


def ruleset(links: Mapping[str, Link]) -> str:
    """Return the input of `nft -f -` that drops exactly the packets of these links, replacing all earlier rules."""
    lines = [f"add table {TABLE}", f"delete table {TABLE}", f"add table {TABLE}"]
    lines.append(f"add chain {TABLE} passing {{ type filter hook forward priority 0; }}")
    for host, link in links.items():
        for way, passes in (("iifname", link.from_host), ("oifname", link.to_host)):
            if not passes:
                lines.append(f'add rule {TABLE} passing {way} "{port(host)}" drop')
            elif link.loss:
                draw = f"numgen random mod {PARTS} < {round(link.loss * PARTS)}"
                lines.append(f'add rule {TABLE} passing {way} "{port(host)}" {draw} drop')
    return "".join(f"{line}\n" for line in lines)


def shaping(device: str, rate: str) -> list[str]:
    """Return the arguments of tc that limit a device's outgoing rate, or remove the limit."""
    if not rate:
        return ["qdisc", "del", "dev", device, "root"]
    burst = max(BURST_BYTES, round(_bits(rate) / 8 * BURST_S))
    shape = ["tbf", "rate", rate, "burst", f"{burst}b", *LATENCY.split()]
    return ["qdisc", "replace", "dev", device, "root", *shape]


def _bits(rate: str) -> int:
    """Return bits per second."""
    number, unit = rate.removesuffix("bit")[:-1], rate.removesuffix("bit")[-1]
    return int(number) * {"k": 10**3, "m": 10**6, "g": 10**9}[unit]
