"""Network isolation of single processes on this machine: drop their TCP packets or close their connections.

Packets are dropped by an nftables table that a child process `nft` owns. The kernel removes the table when the child
exits, so the table cannot outlive this process. Requires root.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic.errors import Invalid

ANSWER_S = 5.0  # time limit for nft or ss to respond, in seconds
LISTEN = "0A"

End = tuple[str, int]  # IP address and port


@dataclass(frozen=True)
class Socket:
    """One TCP socket of a process. ``peer`` is None for a listening socket."""

    own: End
    peer: End | None


def check_partition() -> None:
    """Raise Invalid if packets cannot be dropped on this machine. The check creates a table without rules."""
    if os.geteuid() != 0:
        raise Invalid(
            "a partition drops packets, which requires root: run the command as root, or omit partition from the"
            " faults"
        )
    if shutil.which("nft") is None:
        raise Invalid(
            "a partition requires the program nft: run apt-get install nftables, or omit partition from the faults"
        )
    try:
        PacketFilter(os.getpid()).close()
    except OSError as error:
        raise Invalid(
            f"no partition can be created on this machine: {error}. Omit partition from the faults"
        ) from None


def check_cut() -> None:
    """Raise Invalid if this process lacks the permission to close connections of other processes."""
    if os.geteuid() != 0:
        raise Invalid("a cut requires root: run the command as root, or omit cut from the faults")
    if shutil.which("ss") is None:
        raise Invalid(
            "a cut requires the program ss: run apt-get install iproute2, or omit cut from the faults"
        )


def sockets_of(pid: int) -> list[Socket]:
    """Return the TCP sockets of a process.

    Raises OSError if the process has exited or is in another network namespace.
    """
    if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        raise OSError(
            f"process {pid} is in another network namespace, so its connections can't be closed: run the command in"
            " the namespace of the job"
        )
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        # The process may have closed the socket in the meantime.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    sockets = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{table}") as file:
            sockets += [s for line in file if (s := _socket(line.split(), inodes)) is not None]
    return sockets


def _socket(fields: list[str], inodes: Collection[str]) -> Socket | None:
    if len(fields) < 10 or fields[9] not in inodes:
        return None
    peer = None if fields[3] == LISTEN else _end(fields[2])
    return Socket(_end(fields[1]), peer)


def _end(text: str) -> End:
    """Parse an address of ``/proc/net/tcp`` such as ``0100007F:1F90``, which means 127.0.0.1 and port 8080.

    The four-byte words of the address are in this machine's byte order.
    """
    words, _, port = text.partition(":")
    data = b"".join(
        int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)
    )
    address = ipaddress.ip_address(data)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address), int(port, 16)


def close_connections(pid: int, peers: Iterable[int]) -> int:
    """Close the TCP connections between a process and other processes of this machine.

    Returns:
        The number of closed connections.

    Raises:
        OSError: the sockets of ``pid`` cannot be read, or ``ss`` is missing.
    """
    theirs = {socket.own for peer in peers for socket in _sockets_or_none(peer)}
    closed = 0
    for socket in sockets_of(pid):
        if socket.peer is None or socket.peer not in theirs:
            continue
        words = ["src", _host(socket.own), "sport", "=", f":{socket.own[1]}"]
        words += ["dst", _host(socket.peer), "dport", "=", f":{socket.peer[1]}"]
        done = subprocess.run(
            ["ss", "-KtnH", *words], capture_output=True, text=True, timeout=ANSWER_S
        )
        closed += bool(done.stdout.strip())
    return closed


def _sockets_or_none(pid: int) -> list[Socket]:
    try:
        return sockets_of(pid)
    except OSError:
        return []


def _host(end: End) -> str:
    return f"[{end[0]}]" if ":" in end[0] else end[0]


class PacketFilter:
    """Context manager that drops all TCP packets of selected sockets while it is open.

    Raises OSError if nft cannot be run or does not create the table.
    """

    def __init__(self, number: int) -> None:
        """Create the filter. ``number`` makes the table's name unique on this machine."""
        self.table = f"inet elastic_chaos_{number}"
        self._known: set[str] = set()
        self._nft = subprocess.Popen(
            ["nft", "-i"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C must reach only this process, not nft.
        )
        try:
            self._write([f"add table {self.table} {{ flags owner; }}", *self._rules()])
            self._check()
        except OSError:
            self.close()
            raise

    def drop(self, sockets: Iterable[Socket]) -> None:
        """Also drop the packets of these sockets. Sockets that are already selected are ignored."""
        elements = {text for socket in sockets for text in _elements(socket)}
        new = sorted(elements - self._known)
        self._known |= elements
        if new:
            self._write([f"add element {self.table} {text}" for text in new])

    def close(self) -> None:
        """Stop dropping packets. Idempotent."""
        if self._nft.poll() is None and self._nft.stdin is not None:
            with contextlib.suppress(OSError):
                self._nft.stdin.close()
            try:
                self._nft.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self._nft.kill()
                self._nft.wait()

    def _rules(self) -> list[str]:
        lines = []
        for family, address in (("ip", "ipv4_addr"), ("ip6", "ipv6_addr")):
            flow = f"{address} . inet_service . {address} . inet_service"
            lines.append(f"add set {self.table} flows_{family} {{ type {flow}; }}")
            lines.append(
                f"add set {self.table} doors_{family} {{ type {address} . inet_service; }}"
            )
        lines.append(f"add set {self.table} doors {{ type inet_service; }}")
        for hook in ("input", "output"):
            chain = f"{{ type filter hook {hook} priority 0; policy accept; }}"
            lines.append(f"add chain {self.table} {hook} {chain}")
            for family in ("ip", "ip6"):
                flow = f"{family} saddr . tcp sport . {family} daddr . tcp dport"
                lines.append(f"add rule {self.table} {hook} {flow} @flows_{family} drop")
                to = f"{family} daddr . tcp dport @doors_{family} drop"
                lines.append(f"add rule {self.table} {hook} {to}")
            lines.append(f"add rule {self.table} {hook} tcp dport @doors drop")
        return lines

    def _write(self, lines: Iterable[str]) -> None:
        assert self._nft.stdin is not None
        self._nft.stdin.write("".join(f"{line}\n" for line in lines))
        self._nft.stdin.flush()

    def _check(self) -> None:
        """Wait until nft has created the table. nft does not report this.

        Raises OSError if the table does not appear.
        """
        deadline = time.monotonic() + ANSWER_S
        while self._nft.poll() is None and time.monotonic() < deadline:
            listed = subprocess.run(
                ["nft", "list", "tables"], capture_output=True, text=True, timeout=ANSWER_S
            )
            if f"table {self.table}" in listed.stdout.splitlines():
                return
            time.sleep(0.01)
        raise OSError(
            "nft could not create a table owned by its process, which requires Linux 5.12 and nft 0.9.9: update them,"
            " or omit partition from the faults"
        )


def _elements(socket: Socket) -> list[str]:
    address, port = socket.own
    family = "ip6" if ":" in address else "ip"
    if socket.peer is not None:
        there, their_port = socket.peer
        return [
            f"flows_{family} {{ {address} . {port} . {there} . {their_port} }}",
            f"flows_{family} {{ {there} . {their_port} . {address} . {port} }}",
        ]
    if address in ("0.0.0.0", "::"):
        return [f"doors {{ {port} }}"]
    return [f"doors_{family} {{ {address} . {port} }}"]
