"""Hosts as network namespaces: a switch, cables, addresses, programs on the hosts, and faults of hosts.

This machine's own network is not changed: switch and hosts are namespaces with names of this run, their addresses exist
only there, and all of it is removed when the network is closed. Remains of a killed run are removed by the next one.
Applies the rules of `links`. Requires root.

Processes use this machine's files and process IDs; but each host has its own name, resolves the other names, and its
programs end with the thread that started them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from elastic.errors import ElasticError, Invalid
from harness.processes import path_of_tests
from stress.hosts import links
from stress.hosts.links import Link

SUBNET = "10.77.0"
SWITCH = "switch"
BRIDGE = "br0"
ANSWER_S = 10.0  # seconds for ip, nft and tc to answer
DEATH_S = 5.0  # seconds for killed processes to disappear
NEEDED = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "unshare": "util-linux"}

_PREFIX = "elastic-chaos"
_NAME = re.compile(rf"{_PREFIX}\.(\d+)\.(\d+)\.\d+\.[a-z0-9-]+")
_ENTER = (
    'hostname "$1" && shift && while [ "$1" != run ]; do mount --bind "$1" "$2" && shift 2 || exit 1;'
    ' done && shift && exec setpriv --pdeathsig KILL -- "$@"'
)
_numbers = itertools.count(1)


class NetworkTrouble(ElasticError):
    """The network could not be created or changed; the text is the error of ip, nft or tc."""


def check_possible() -> None:
    """Raise Invalid if network namespaces are not possible here."""
    if os.geteuid() != 0:
        raise Invalid("network namespaces need root; run as root")
    for program, package in NEEDED.items():
        if shutil.which(program) is None:
            raise Invalid(f"program {program} not found: install it (apt-get install {package})")
    probe = _namespace("probe")
    try:
        _ip("netns", "add", probe)
        _nft(probe, links.ruleset({"probe": Link(loss=0.5)}))
    except NetworkTrouble as error:
        raise Invalid(f"network namespaces are not possible here: {error}") from None
    finally:
        with contextlib.suppress(NetworkTrouble):
            _ip("netns", "delete", probe)


def obstacle(*, sshd: bool = False) -> str:
    """Return why tests on network namespaces, or with sshd on them, can't run here; empty if they can."""
    try:
        check_possible()
    except Invalid as error:
        return str(error)
    if sshd and shutil.which("sshd") is None:
        return "needs sshd; apt-get install openssh-server"
    return ""


class Host:
    """One host of a network. ``mounts``: files that replace this machine's for its programs."""

    def __init__(self, name: str, number: int) -> None:
        self.name = links.check_name(name)
        self.address = f"{SUBNET}.{number}"
        self.mounts: dict[Path, Path] = {}  # file -> the path that it replaces
        self.link = Link()
        self.alive = True
        self._started: list[subprocess.Popen[bytes]] = []
        self._number = number
        self.namespace = _namespace(name)

    def popen(self, words: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start a program on the host, and return its process. It ends with the host at the latest."""
        if not self.alive:
            raise NetworkTrouble(f"host {self.name} is dead; heal it before you start anything")
        bound = [str(path) for pair in self.mounts.items() for path in pair]
        prefix = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--"]
        enter = ["sh", "-c", _ENTER, "sh", self.name, *bound, "run"]
        how.setdefault("stdin", subprocess.DEVNULL)
        self._started.append(subprocess.Popen([*prefix, *enter, *words], **how))
        return self._started[-1]

    def run(self, words: Sequence[str], *, timeout: float = ANSWER_S) -> str:
        """Return the output of a program on the host. Raises NetworkTrouble if it fails."""
        process = self.popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            trouble = f"{words[0]} did not end on host {self.name} in {timeout:g} s"
            raise NetworkTrouble(trouble) from None
        if process.returncode:
            trouble = output.decode(errors="replace").strip()
            raise NetworkTrouble(f"{words[0]} on host {self.name}: {trouble or 'failed'}")
        return output.decode(errors="replace")

    def buried(self) -> None:
        """Reap the host's processes and close their pipes."""
        for process in self._started:
            process.wait(DEATH_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._started.clear()

    def pids(self) -> list[int]:
        """Return all processes that run on the host."""
        return _pids(self.namespace) if self.alive else []

    @property
    def hardware_address(self) -> str:
        """MAC address, the same after a restart, like a real machine's."""
        return f"02:00:00:00:00:{self._number:02x}"


class Network:
    """Hosts by name, all connected to one switch. A context manager. ``folder`` receives a file with their names.

    Every fault lasts until `heal`, and returns the time, on the monotonic clock, at which it began.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.hosts = {name: Host(name, number) for number, name in enumerate(names, start=1)}
        self._names_file = folder / "hosts"
        self._switch = _namespace(SWITCH)
        self._lines: dict[str, subprocess.Popen[bytes]] = {}  # delay lines, by host

    def __enter__(self) -> Network:
        sweep()
        names = [f"{host.address} {name}" for name, host in self.hosts.items()]
        self._names_file.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
            _ip("-n", self._switch, "link", "set", BRIDGE, "up")
            for host in self.hosts.values():
                host.mounts[self._names_file] = Path("/etc/hosts")
                self._plug_in(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes on the hosts, and remove the hosts."""
        for line in self._lines.values():
            _end(line)
        self._lines.clear()
        for host in self.hosts.values():
            _remove(host.namespace)
            host.buried()
        _remove(self._switch)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def cut(self, host: str) -> float:
        """Drop all packets to and from the host."""
        return self._change(host, from_host=False, to_host=False)

    def cut_one_way(self, host: str, way: str) -> float:
        """Drop all packets in one direction. ``way``: ``from`` the host, or ``towards`` it."""
        if way not in ("from", "towards"):
            raise Invalid(f"{way!r} is not a direction of a link: pass from or towards")
        return self._change(host, **{"from_host" if way == "from" else "to_host": False})

    def lose(self, host: str, share: float) -> float:
        """Drop this share of the packets at random, in both directions."""
        return self._change(host, loss=share)

    def slow(self, host: str, rate: str) -> float:
        """Limit both directions to this rate, such as 10mbit."""
        return self._change(host, rate=rate)

    def delay(self, host: str, delay_s: float) -> float:
        """Delay each packet by this time, in both directions."""
        return self._change(host, delay_s=delay_s)

    def kill_host(self, host: str) -> float:
        """Kill a host as by a power failure: its processes end, and no packet announces it."""
        at = self.cut(host)
        victim = self.hosts[host]
        _kill(victim.namespace)
        _ip("-n", self._switch, "link", "delete", links.port(host))
        _remove(victim.namespace)  # its sockets are removed without notifying their peers
        victim.alive = False
        return at

    def heal(self, host: str) -> float:
        """Restore the link. A dead host exists again, without processes."""
        victim = self.hosts[host]
        dead = not victim.alive
        if dead:
            victim.link = Link()  # the port was removed with the host
            self._plug_in(victim)
            victim.alive = True
        return self._change(host, **{} if dead else vars(Link()))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _plug_in(self, host: Host) -> None:
        _ip("netns", "add", host.namespace)
        peer = ["peer", "name", "eth0", "address", host.hardware_address, "netns", host.namespace]
        plug = links.port(host.name)
        _ip("-n", self._switch, "link", "add", plug, "type", "veth", *peer)
        _ip("-n", self._switch, "link", "set", plug, "master", BRIDGE, "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host.namespace, "link", "set", device, "up")

    def _change(self, name: str, **fields: Any) -> float:
        """Change these fields of the link."""
        host = self.hosts[name]
        before, host.link = host.link, replace(host.link, **fields)
        at = time.monotonic()
        _nft(self._switch, links.ruleset({each.name: each.link for each in self.hosts.values()}))
        if host.link.rate != before.rate:
            for namespace, device in (host.namespace, "eth0"), (self._switch, links.port(name)):
                _run(["tc", "-n", namespace, *links.shaping(device, host.link.rate)])
        if host.link.delay_s != before.delay_s:
            self._hold_back(name, host.link.delay_s)
        return at

    def _hold_back(self, name: str, delay_s: float) -> None:
        """Insert a delay line between the host's port and the switch, or remove it."""
        plug, near, far, between = links.port(name), f"d0-{name}", f"d1-{name}", f"b-{name}"
        if (line := self._lines.pop(name, None)) is not None:
            _ip("-n", self._switch, "link", "set", plug, "master", BRIDGE)
            _end(line)
            _ip("-n", self._switch, "link", "delete", between)
        if not delay_s:
            return
        program = [sys.executable, "-m", "stress.hosts.netem"]
        words = ["ip", "netns", "exec", self._switch, *program, near, far, f"{delay_s * 1e3:g}"]
        line = subprocess.Popen(
            words, env=os.environ | path_of_tests(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._lines[name] = line
        if _answer(line) != "ready":
            raise NetworkTrouble("the delay line did not start: check that /dev/net/tun exists")
        _ip("-n", self._switch, "link", "add", between, "type", "bridge")
        for device, master in (near, between), (far, BRIDGE):
            _ip("-n", self._switch, "link", "set", device, "master", master, "up")
        _ip("-n", self._switch, "link", "set", between, "up")
        _ip("-n", self._switch, "link", "set", plug, "master", between)


def sweep() -> list[str]:
    """Remove namespaces of ended runs. Return their names."""
    found = []
    for name in _namespaces():
        if (match := _NAME.fullmatch(name)) and _began(int(match[1])) != match[2]:
            _remove(name)
            found.append(name)
    return found


def _namespace(host: str) -> str:
    """Return a name with the ID and start time of this process, so that a reused ID is not confused."""
    return f"{_PREFIX}.{os.getpid()}.{_began(os.getpid())}.{next(_numbers)}.{host}"


def _began(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _namespaces() -> Iterator[str]:
    for line in _ip("netns", "list").splitlines():
        yield line.split()[0]


def _pids(namespace: str) -> list[int]:
    return [int(word) for word in _ip("netns", "pids", namespace).split()]


def _kill(namespace: str) -> None:
    """Kill processes until none is left, also new ones. Raises NetworkTrouble at the deadline."""
    deadline = time.monotonic() + DEATH_S
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise NetworkTrouble(f"{len(pids)} processes in {namespace} can't be killed")
        time.sleep(0.002)


def _remove(namespace: str) -> None:
    if namespace in _namespaces():
        _kill(namespace)
        _ip("netns", "delete", namespace)


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _nft(namespace: str, rules: str) -> None:
    _run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], text=rules)


def _run(words: Sequence[str], *, text: str | None = None) -> str:
    """Return the output of a command. Raises NetworkTrouble."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkTrouble(f"{words[0]}: {error}") from None
    if done.returncode:
        raise NetworkTrouble(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _answer(process: subprocess.Popen[bytes]) -> str:
    """Return the first line of its output; empty if it ends without one."""
    assert process.stdout is not None
    stdout: IO[bytes] = process.stdout
    return stdout.readline().decode().strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process by closing its standard input."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(DEATH_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
