"""Parsing of host lists, and detection of host names that refer to this machine. Name lookups have a timeout.

A host is written ``name``, ``name:slots`` or ``name slots=N``. An IPv6 address is in brackets, ``[::1]:4``. The name is
used as written and identifies the host: ``localhost`` and ``127.0.0.2`` are two hosts, although both are this machine.
Listing a name twice is an error, because adding up the slots could silently overload a host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from concurrent import futures

from elastic.driver.network.blocking_calls import begun
from elastic.errors import Invalid

# maximum number of slots of a host; a larger number is probably a typo or a port number
SLOTS_LIMIT = 4096
RESOLVE_S = 5.0
_FILE_LIMIT = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_LINE = re.compile(r"(?P<host>\S+?)(\s+slots\s*=\s*(?P<slots>\S+))?")


def parse_host(text: str, *, default_slots: int = 1, slots_min: int = 1) -> tuple[str, int]:
    """Parse a host such as ``"gpu7:4"`` to ``("gpu7", 4)``. If it has no number of slots, use ``default_slots``.

    Raises:
        Invalid: the name or the number of slots is invalid. The message is a clause, to which the caller adds the
            source.
    """
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (rest and not rest.startswith(":")):
            raise Invalid(
                f"{text!r} has an invalid address in brackets: write the address as in [::1]:4"
            )
        slots = rest[1:] if rest else None
    elif text.count(":") > 1:
        raise Invalid(
            f"{text!r} has several colons: write IPv6 addresses in brackets, as in [::1]:4"
        )
    else:
        name, colon, rest = text.partition(":")
        if not _NAME.fullmatch(name):
            raise Invalid(f"{text!r} has no valid host name: pass host:slots, as in gpu7:4")
        slots = rest if colon else None
    return name, default_slots if slots is None else _slots(text, slots, slots_min)


def parse_line(line: str, *, default_slots: int = 1, slots_min: int = 1) -> tuple[str, int] | None:
    """Parse a line of a hostfile or of a discovery script's output.

    Returns:
        The host and its number of slots, or None for a blank line or a comment.

    Raises:
        Invalid: the line is malformed, or its number of slots is less than ``slots_min``.
    """
    text = line.partition("#")[0].strip()
    if not text:
        return None
    match = _LINE.fullmatch(text)
    if match is None:
        raise Invalid(f"{text[:80]!r} is not a valid entry: write host:slots or host slots=N")
    host, slots = parse_host(match["host"], default_slots=default_slots, slots_min=slots_min)
    if match["slots"] is not None:
        if match["host"] not in (host, f"[{host}]"):
            raise Invalid(
                f"{text[:80]!r} specifies the slots twice: write host:slots or host slots=N"
            )
        slots = _slots(text, match["slots"], slots_min)
    return host, slots


def parse_hosts(text: str, *, default_slots: int = 1) -> dict[str, int]:
    """Parse a list such as ``"localhost:2,127.0.0.2:2"`` to the slots of each host, in order.

    Raises:
        Invalid: an entry is malformed, or a host is listed twice.
    """
    hosts: dict[str, int] = {}
    try:
        for entry in text.split(","):
            _add(hosts, *parse_host(entry.strip(), default_slots=default_slots))
    except Invalid as error:
        raise Invalid(f"-H {text}: {error}") from None
    return hosts


def parse_lines(
    text: str, *, source: str, default_slots: int = 1, slots_min: int = 1
) -> dict[str, int]:
    """Parse text with one host per line, and return the number of slots of each host, in order.

    If ``slots_min`` is 0, a host may have no slots and is then omitted.

    Raises:
        Invalid: a line is malformed. The message contains ``source``, the line number and the line.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = parse_line(line, default_slots=default_slots, slots_min=slots_min)
            if entry is not None:
                _add(hosts, *entry)
        except Invalid as error:
            shown = line.strip()[:80]
            raise Invalid(f"{source} line {number} reads {shown!r}: {error}") from None
    return {host: slots for host, slots in hosts.items() if slots}


def read_hostfile(path: str, *, default_slots: int = 1) -> dict[str, int]:
    """Read a hostfile, and return the number of slots of each host, in order.

    Raises:
        Invalid: the file cannot be read, lists no host, or has an invalid line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_FILE_LIMIT)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Invalid(
            f"the hostfile {path} can't be read: {reason}. Pass a readable file"
        ) from None
    hosts = parse_lines(text, source=f"hostfile {path}", default_slots=default_slots)
    if not hosts:
        raise Invalid(f"the hostfile {path} lists no host: write lines such as gpu7 slots=4")
    return hosts


def show(hosts: dict[str, int]) -> str:
    """Format hosts as in the argument of ``-H``. A long list is truncated."""
    entries = [f"[{h}]:{n}" if ":" in h else f"{h}:{n}" for h, n in hosts.items()]
    more = f" and {len(entries) - 8} more" if len(entries) > 8 else ""
    return (",".join(entries[:8]) or "none") + more


class _Unresolved(Exception):
    """Error raised when a name cannot be resolved at the moment, so a retry may succeed."""


class ThisHost:
    """Recognizer of names that refer to this machine.

    It accepts this machine's addresses (including loopback), its host name, and names that resolve to these addresses.

    Addresses and the plain host name need no lookup. Other names are resolved once, within ``resolve_s`` seconds. Tests
    pass ``hostname``, ``resolve`` and ``has_address``, so that they need no network.
    """

    def __init__(
        self,
        *,
        hostname: str | None = None,
        resolve: Callable[[str], list[str]] | None = None,
        has_address: Callable[[str], bool] | None = None,
        resolve_s: float = RESOLVE_S,
    ) -> None:
        self._names = {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
        self._names.add((hostname or socket.gethostname()).lower())
        self._resolve = resolve or _resolve
        self._has_address = has_address or _has_address
        self._resolve_s = resolve_s
        self._known: dict[str, str | None] = {}

    def elsewhere(self, host: str) -> str | None:
        """Return None if ``host`` is this machine, otherwise a clause that explains why it is not.

        Blocks for up to ``resolve_s`` seconds.
        """
        if host not in self._known:
            try:
                self._known[host] = self._judge(host)
            except _Unresolved as error:
                # The lookup may succeed later, so its failure is not cached.
                return str(error)
        return self._known[host]

    def _judge(self, host: str) -> str | None:
        if host.lower().rstrip(".") in self._names:
            return None
        address = literal_address(host)
        if address is not None:
            return None if self._is_here(address) else f"{host} is not an address of this machine"
        lookup = begun(lambda: self._resolve(host), f"resolve {host}")
        if not futures.wait([lookup], self._resolve_s).done:
            raise _Unresolved(
                f"host {host!r} was not resolved within {self._resolve_s:g} s: check the name server, or pass an"
                " IP address"
            )
        try:
            addresses = lookup.result()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _Unresolved(
                f"host {host!r} can't be resolved: {reason}. Check the spelling and DNS, or pass an IP address"
            ) from None
        here = any(map(self._is_here, addresses))
        return None if here else f"{host} is another machine ({', '.join(addresses[:3])})"

    def _is_here(self, address: str) -> bool:
        ip = ipaddress.ip_address(address)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return ip.is_loopback or (not ip.is_unspecified and self._has_address(address))


def literal_address(host: str) -> str | None:
    """Return the address in canonical form if ``host`` is an address, or None if it is a name.

    For example ``127.1`` and ``0x7f.1`` become ``127.0.0.1``.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return None


def parse_address(text: str) -> tuple[str, int]:
    """Parse an address such as ``"driver.lab:4711"`` or ``"[fd00::1]:4711"`` to a host and a port.

    Raises:
        Invalid: the text is not such an address.
    """
    name, _, port = text.rpartition(":")
    bracketed = name.startswith("[") and name.endswith("]") and _is_ipv6(name[1:-1])
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else 0
    if not (bracketed or _NAME.fullmatch(name)) or not 0 < number < 65536:
        raise Invalid(
            f"{text!r} is not an address and port: write host:port, as in gpu7:4711 or [::1]:4711"
        )
    return (name[1:-1] if bracketed else name), number


def _add(hosts: dict[str, int], host: str, slots: int) -> None:
    if host in hosts:
        raise Invalid(f"host {host} is listed twice: list the host once, with all its slots")
    hosts[host] = slots


def _slots(text: str, slots: str, slots_min: int) -> int:
    number = int(slots) if re.fullmatch(r"[0-9]{1,9}", slots) else -1
    if number < slots_min:
        raise Invalid(
            f"{text!r} has an invalid number of slots: pass a whole number of at least {slots_min}, as in gpu7:4"
        )
    if number > SLOTS_LIMIT:
        raise Invalid(
            f"{text!r} has more than {SLOTS_LIMIT} slots for one host: pass host:slots, without a port"
        )
    return number


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _resolve(name: str) -> list[str]:
    addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in addresses))


def _has_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
