"""What a job keeps in etcd, and under which keys. Decides nothing, starts nothing.

All of it is under ``/hvd-elastic/<job>/``:

    hosts/<host>   HostRecord, under the lease of the host's agent
    driver         SeatRecord, under the lease of the driver that leads
    term           of the last driver that has led; stays
    operators      host:port, where the last driver that has led hears operators; stays
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from elastic.driver.network.hosts import SLOTS_LIMIT, parse_host
from elastic.errors import Invalid

ROOT = "/hvd-elastic/"
NAME_LIMIT = 200
HOST_LIMIT = 253  # characters, as in DNS


class HostRecord(msgspec.Struct, frozen=True):
    slots: int
    incarnation: int  # of the agent; a later start has a greater one


class SeatRecord(msgspec.Struct, frozen=True):
    term: int
    address: str = ""  # empty: not known yet
    port: int = 0


class DriverSeat(NamedTuple):
    """Where the driver of a job is, and which of its drivers that is."""

    address: str  # host:port
    term: int


def job_root(job: str) -> str:
    """The prefix of all keys of a job. Raises Invalid for a name that can't be one."""
    if not job or "/" in job or not job.isprintable() or len(job) > NAME_LIMIT:
        raise Invalid(f"{job!r} is not a valid job name: use a short one without '/'")
    return f"{ROOT}{job}/"


def operators_key(job: str) -> str:
    """Raises Invalid, as `job_root`."""
    return f"{job_root(job)}operators"


def check_host(host: str) -> str:
    """The host's name as it is; raises Invalid if it can't be one."""
    if len(host) > HOST_LIMIT:
        raise Invalid(f"a host name has at most {HOST_LIMIT} characters; {host[:20]!r}... has more")
    if parse_host(f"[{host}]" if ":" in host else host)[0] != host:
        raise Invalid(f"{host!r} contains slots: pass the name only")
    return host


def check_slots(slots: int) -> int:
    if not 0 < slots <= SLOTS_LIMIT:
        raise Invalid(f"a host can't have {slots} slots: pass 1 to {SLOTS_LIMIT}")
    return slots


def read_host(name: str, value: bytes) -> HostRecord | None:
    """None for what is not a host."""
    try:
        check_host(name)
        record = msgspec.json.decode(value, type=HostRecord)
        check_slots(record.slots)
    except (Invalid, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record


def read_seat(value: bytes) -> SeatRecord | None:
    """None for what is not a seat."""
    try:
        return msgspec.json.decode(value, type=SeatRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def seat_of(record: SeatRecord | None) -> DriverSeat | None:
    """None: no driver leads, or where it is isn't known yet."""
    if record is None or not record.address:
        return None
    host = f"[{record.address}]" if ":" in record.address else record.address
    return DriverSeat(f"{host}:{record.port}", record.term)


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, an IPv6 address in brackets. Raises Invalid."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Invalid(f"{address!r} is not an address: write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
