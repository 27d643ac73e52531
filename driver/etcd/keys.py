"""Keys and values of a job in etcd. Makes no decisions, and starts nothing.

All keys are under ``/hvd-elastic/<job>/``:

    hosts/<host>   HostRecord, under the lease of the host's agent
    driver         LeaderRecord, under the lease of the driver that leads
    term           term of the newest leader; permanent
    operators      host:port of the last leader for operators; permanent
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from elastic.driver.network.host_lists import SLOTS_LIMIT, parse_host
from elastic.errors import Invalid

ROOT = "/hvd-elastic/"
NAME_LIMIT = 200
HOST_LIMIT = 253  # maximum length of a host name in characters, as in DNS


class HostRecord(msgspec.Struct, frozen=True):
    slots: int
    incarnation: int  # incarnation of the host's agent, which increases with each restart


class LeaderRecord(msgspec.Struct, frozen=True):
    term: int
    address: str = ""  # address of the driver for agents; empty if not known yet
    port: int = 0


class LeaderAddress(NamedTuple):
    """Address and term of the driver that leads a job."""

    address: str  # address to which agents connect, host:port
    term: int


def job_root(job: str) -> str:
    """Return the prefix of all keys of a job.

    Raises:
        Invalid: the name is empty, too long, or contains a slash.
    """
    if not job or "/" in job or not job.isprintable() or len(job) > NAME_LIMIT:
        raise Invalid(
            f"job name {job!r} is invalid: pass a name of at most {NAME_LIMIT} characters without '/'"
        )
    return f"{ROOT}{job}/"


def operators_key(job: str) -> str:
    """Return the key that contains a job's address for operators. Raises Invalid if the job's name is invalid."""
    return f"{job_root(job)}operators"


def check_host(host: str) -> str:
    """Check the name of a host, and return it unchanged.

    Raises:
        Invalid: the name is too long, malformed, or includes a number of slots.
    """
    if len(host) > HOST_LIMIT:
        raise Invalid(
            f"host name {host[:20]!r}... is too long: pass at most {HOST_LIMIT} characters"
        )
    if parse_host(f"[{host}]" if ":" in host else host)[0] != host:
        raise Invalid(f"host name {host!r} includes a number of slots: pass only the name")
    return host


def check_slots(slots: int) -> int:
    if not 0 < slots <= SLOTS_LIMIT:
        raise Invalid(f"slots is {slots}: pass 1 to {SLOTS_LIMIT}")
    return slots


def read_host(name: str, value: bytes) -> HostRecord | None:
    """Parse a host's value in etcd. Return None if the value is invalid."""
    try:
        check_host(name)
        record = msgspec.json.decode(value, type=HostRecord)
        check_slots(record.slots)
    except (Invalid, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record


def read_leader(value: bytes) -> LeaderRecord | None:
    """Parse the leader's value in etcd. Return None if the value is invalid."""
    try:
        return msgspec.json.decode(value, type=LeaderRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def leader_of(record: LeaderRecord | None) -> LeaderAddress | None:
    """Return the leader's address and term, or None if no driver leads or its address is not known yet."""
    if record is None or not record.address:
        return None
    host = f"[{record.address}]" if ":" in record.address else record.address
    return LeaderAddress(f"{host}:{record.port}", record.term)


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``, with an IPv6 address in brackets. Raises Invalid if the text has another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Invalid(f"{address!r} is not an address: pass host:port, as in gpu7:4711")
    return host.removeprefix("[").removesuffix("]"), int(port)
