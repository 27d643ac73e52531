"""Reads from /proc what a process does and whether it is able to run at all. Decides nothing.

A process that was not reaped yet keeps its number, so that these are the figures of that process and of no other. Each
``parse_`` function is pure; the functions below them read one or a few small files, without ever waiting.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GONE = "X"  # the state of a process that is none any more
STOPPED = "T"
_EXITING = 4  # PF_EXITING, of a thread's flags
_PLAIN = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/", "shm/")  # in /dev


@dataclass(frozen=True)
class Stat:
    """A line of /proc/PID/stat. ``ticks``: processor time of all its threads and of its children that are reaped."""

    state: str
    parent: int
    session: int
    ticks: int


@dataclass(frozen=True)
class Sample:
    """What a process and its whole session did so far. ``io_bytes``: read and written, cached or not. ``memory``: bytes
    that it holds now, with what the session shares counted once.
    """

    state: str
    cpu_s: float
    io_bytes: int
    traced: bool
    memory: int = 0


# ---- texts of the kernel, pure ---------------------------------------------------------------------------------------


def parse_stat(text: bytes) -> Stat:
    """The command's name stands in parentheses and may itself hold spaces and parentheses. Raises ValueError."""
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 15:
        raise ValueError(f"no line of /proc/PID/stat: {text[:80]!r}")
    ticks = sum(map(int, fields[11:15]))
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), ticks)


def parse_end(text: bytes) -> tuple[bool, int]:
    """Of a thread's line: whether it will never run again, and how its process ends, as ``waitpid`` has it."""
    fields = text.rpartition(b")")[2].split()
    ending = fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)
    return ending, int(fields[49])


def parse_status(text: bytes) -> tuple[int, int]:
    """The process that traces it (0: none), and the signals that it handles, as bits."""
    fields = dict(line.partition(b":")[::2] for line in text.splitlines())
    return int(fields.get(b"TracerPid", b"0")), int(fields.get(b"SigCgt", b"0"), 16)


def parse_io(text: bytes) -> int:
    """Bytes that went through read and write calls of any kind."""
    fields = dict(line.partition(b":")[::2] for line in text.splitlines())
    return int(fields.get(b"rchar", b"0")) + int(fields.get(b"wchar", b"0"))


def parse_statm(text: bytes) -> tuple[int, int]:
    """Pages in memory, and how many of these may be shared with others."""
    fields = text.split()
    return (int(fields[1]), int(fields[2])) if len(fields) > 2 else (0, 0)


def parse_mounts(text: bytes) -> dict[str, str]:
    """Where cgroups can be read: kind, ``freezer`` (version 1) or ``unified`` (version 2), to folder."""
    found: dict[str, str] = {}
    for line in text.decode(errors="surrogateescape").splitlines():
        _, folder, kind, options, *_ = [*line.split(" "), "", "", "", ""]
        if kind == "cgroup2":
            found.setdefault("unified", folder)
        elif kind == "cgroup" and "freezer" in options.split(","):
            found.setdefault("freezer", folder)
    return found


def parse_cgroup(text: bytes, mounts: Mapping[str, str]) -> list[str]:
    """The files that say whether the cgroups of a process are frozen. A root can't be, and has no such file."""
    files = []
    for line in text.decode(errors="surrogateescape").splitlines():
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if path in ("", "/"):
            continue
        if number == "0" and kinds == "" and "unified" in mounts:
            files.append(f"{mounts['unified']}{path}/cgroup.events")
        elif "freezer" in kinds.split(",") and "freezer" in mounts:
            files.append(f"{mounts['freezer']}{path}/freezer.state")
    return files


def says_frozen(text: bytes) -> bool:
    """The content of one of these files."""
    return text.strip() == b"FROZEN" or b"frozen 1" in text.splitlines()


# ---- one process -----------------------------------------------------------------------------------------------------


def stat_of(pid: int) -> Stat:
    """State GONE where there is no such process."""
    try:
        return parse_stat(_read(f"/proc/{pid}/stat"))
    except (OSError, ValueError):
        return Stat(GONE, 0, 0, 0)


def end_of(pid: int) -> int | None:
    """Exit code of a process none of whose threads will ever run again, or minus the signal. None: one may.

    Its memory, descriptors and sockets may still be there.
    """
    try:
        _, code = parse_end(_read(f"/proc/{pid}/stat"))
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile
                if not parse_end(_read(f"/proc/{pid}/task/{thread}/stat"))[0]:
                    return None
    except (OSError, ValueError, IndexError):
        return None
    return os.waitstatus_to_exitcode(code)


def uses_devices(pid: int) -> bool:
    """Whether it has something like a GPU open, which may work for it until that is closed. True where nobody knows.

    Its threads let go of their descriptors one by one, the main thread early: those of one that has them yet count.
    """
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            paths = _open_in(f"/proc/{pid}/task/{thread}/fd")
            if paths:
                return any(
                    path.startswith("/dev/") and not path.startswith(_PLAIN, len("/dev/"))
                    for path in paths
                )
    except OSError:
        return True
    return True  # they are being closed just now


def _open_in(folder: str) -> list[str]:
    paths = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread is gone
        for descriptor in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                paths.append(os.readlink(f"{folder}/{descriptor}"))
    return paths


def traced(pid: int) -> bool:
    """Whether a debugger is attached."""
    return _status(pid)[0] != 0


def handles(pid: int, number: int) -> bool:
    """Whether it has a handler for this signal, which would end it otherwise."""
    return bool(_status(pid)[1] >> (number - 1) & 1)


def frozen(pid: int) -> bool:
    """Whether a cgroup of it is frozen. The kernel shows such a process as one that sleeps."""
    try:
        files = parse_cgroup(_read(f"/proc/{pid}/cgroup"), _mounts())
    except OSError:
        return False
    return any(says_frozen(_read_or_nothing(file)) for file in files)


def cannot_run(pid: int, last: Stat | None) -> tuple[str, Stat]:
    """Why the process can't run now, empty if it can, and its present figures; ``last`` are those of the last look."""
    stat = stat_of(pid)
    if stat.state == STOPPED:
        # A debugger holds what it looks at: that is not the process's own trouble.
        return ("" if traced(pid) else "stopped by a signal such as SIGSTOP"), stat
    moved = last is None or stat.ticks != last.ticks
    if stat.state in "SD" and not moved and frozen(pid):
        return "its cgroup is frozen", stat
    return "", stat


def samples_of(pids: Collection[int]) -> dict[int, Sample]:
    """Each process with all that live in the session that it leads, from one pass over /proc."""
    ticks: dict[int, int] = defaultdict(int)
    io_bytes: dict[int, int] = defaultdict(int)
    pages: dict[int, int] = defaultdict(int)
    states: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        stat = stat_of(int(name))
        if stat.session in pids:
            ticks[stat.session] += stat.ticks
            io_bytes[stat.session] += parse_io(_read_or_nothing(f"/proc/{name}/io"))
            held, shared = parse_statm(_read_or_nothing(f"/proc/{name}/statm"))
            pages[stat.session] += held if int(name) == stat.session else held - shared
            states[int(name)] = stat.state
    return {
        pid: Sample(
            states.get(pid, GONE),
            ticks[pid] / TICKS_PER_S,
            io_bytes[pid],
            traced(pid),
            pages[pid] * PAGE_BYTES,
        )
        for pid in pids
    }


def _status(pid: int) -> tuple[int, int]:
    return parse_status(_read_or_nothing(f"/proc/{pid}/status"))


def _mounts() -> dict[str, str]:
    global _known_mounts
    if _known_mounts is None:
        with open("/proc/self/mounts", "rb") as file:
            _known_mounts = parse_mounts(file.read())  # which may take several reads
    return _known_mounts


_known_mounts: dict[str, str] | None = None


def _read_or_nothing(path: str) -> bytes:
    """Where it may not be read, as in another user's process, nothing is known."""
    try:
        return _read(path)
    except OSError:
        return b""


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 64 * 1024)
    finally:
        os.close(fd)
