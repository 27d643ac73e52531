"""State and resource counters of processes, read from /proc. Makes no decisions.

A process ID is not reused before the process is reaped, so the values cannot belong to another process. The ``parse_``
functions are pure. The other functions read one or a few small files and do not block.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GONE = "X"  # state reported for a process that no longer exists
STOPPED = "T"
_EXITING = 4  # PF_EXITING, in a thread's flags
# devices in /dev that `uses_devices` ignores
_PLAIN = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/", "shm/")


@dataclass(frozen=True)
class Stat:
    """Content of /proc/PID/stat.

    Args:
        ticks: CPU time of all threads and reaped children of the process, in clock ticks.
    """

    state: str
    parent: int
    session: int
    ticks: int


@dataclass(frozen=True)
class ThreadStatus:
    """Content of /proc/PID/task/TID/status.

    Args:
        pending: bit mask of signals that were sent to this thread but not yet delivered.
        blocked: bit mask of signals that are currently blocked. A handler blocks its own signal while it runs.
    """

    id: int
    name: str
    state: str
    pending: int
    blocked: int


@dataclass(frozen=True)
class ProcSample:
    """Total resource usage of all processes in a session.

    Args:
        io_bytes: cumulative number of bytes read and written, including cached I/O.
        memory: current memory in bytes. Memory shared within the session counts once.
    """

    state: str
    cpu_s: float
    io_bytes: int
    traced: bool
    memory: int = 0


# ---- parsers, pure ---------------------------------------------------------------------------------------------------


def parse_stat(text: bytes) -> Stat:
    """Parse the content of /proc/PID/stat. The command name in parentheses may contain any character.

    Raises:
        ValueError: the line has too few fields.
    """
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 15:
        raise ValueError(
            f"{text[:80]!r} is not a line of /proc/PID/stat, which has at least 15 fields"
        )
    ticks = sum(map(int, fields[11:15]))
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), ticks)


def parse_end(text: bytes) -> tuple[bool, int]:
    """Parse /proc/PID/task/TID/stat.

    Returns whether the thread has ended or is exiting, and the wait status of its process.
    """
    fields = text.rpartition(b")")[2].split()
    ending = fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)
    return ending, int(fields[49])


def parse_status(text: bytes) -> tuple[int, int]:
    """Parse /proc/PID/status. Return the process ID of the tracer (0 if none) and a bit mask of the handled signals."""
    fields = dict(line.partition(b":")[::2] for line in text.splitlines())
    return int(fields.get(b"TracerPid", b"0")), int(fields.get(b"SigCgt", b"0"), 16)


def parse_thread(text: bytes) -> ThreadStatus:
    """Parse /proc/PID/task/TID/status.

    Raises:
        ValueError: a field is missing.
    """
    fields = dict(line.partition(b":")[::2] for line in text.splitlines())
    try:
        return ThreadStatus(
            int(fields[b"Pid"]),
            fields[b"Name"].strip().decode(errors="replace"),
            fields[b"State"].strip()[:1].decode(),
            int(fields[b"SigPnd"], 16),
            int(fields[b"SigBlk"], 16),
        )
    except KeyError as error:
        raise ValueError(f"{text[:80]!r} is not the status of a thread") from error


def parse_io(text: bytes) -> int:
    """Parse ``/proc/PID/io``. Return the number of bytes that all read and write calls transferred."""
    fields = dict(line.partition(b":")[::2] for line in text.splitlines())
    return int(fields.get(b"rchar", b"0")) + int(fields.get(b"wchar", b"0"))


def parse_statm(text: bytes) -> tuple[int, int]:
    """Parse /proc/PID/statm. Return the number of resident pages, and the number of those that may be shared."""
    fields = text.split()
    return (int(fields[1]), int(fields[2])) if len(fields) > 2 else (0, 0)


def parse_mounts(text: bytes) -> dict[str, str]:
    """Return the mount points of cgroups by kind: ``freezer`` (version 1) or ``unified`` (version 2)."""
    found: dict[str, str] = {}
    for line in text.decode(errors="surrogateescape").splitlines():
        _, folder, kind, options, *_ = [*line.split(" "), "", "", "", ""]
        if kind == "cgroup2":
            found.setdefault("unified", folder)
        elif kind == "cgroup" and "freezer" in options.split(","):
            found.setdefault("freezer", folder)
    return found


def parse_cgroup(text: bytes, mounts: Mapping[str, str]) -> list[str]:
    """Return the paths of the files that contain the freezer state of a process's cgroups.

    Root cgroups are omitted, because they cannot be frozen and have no such file.
    """
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


def is_frozen(text: bytes) -> bool:
    """Return whether a cgroup is frozen, given the content of its freezer's state file."""
    return text.strip() == b"FROZEN" or b"frozen 1" in text.splitlines()


# ---- one process -----------------------------------------------------------------------------------------------------


def stat_of(pid: int) -> Stat:
    """Return the content of /proc/PID/stat. If the process does not exist, the state in the result is GONE."""
    try:
        return parse_stat(_read(f"/proc/{pid}/stat"))
    except (OSError, ValueError):
        return Stat(GONE, 0, 0, 0)


def end_of(pid: int) -> int | None:
    """Return the exit code, or the negative signal number, of a process whose threads have all ended or are exiting.

    Returns None if the process is still running. When this function returns a code, the kernel may not have released
    the memory, descriptors and sockets of the process yet.
    """
    try:
        _, code = parse_end(_read(f"/proc/{pid}/stat"))
        for thread in os.listdir(f"/proc/{pid}/task"):
            # The thread or process may be gone by now.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not parse_end(_read(f"/proc/{pid}/task/{thread}/stat"))[0]:
                    return None
    except (OSError, ValueError, IndexError):
        return None
    return os.waitstatus_to_exitcode(code)


def uses_devices(pid: int) -> bool:
    """Return whether a process still has a device such as a GPU open.

    Returns True if this cannot be determined.

    The threads of an exiting process release their descriptors one after another, the main thread early. The first
    thread that still has descriptors is therefore examined.
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
    return True  # all descriptors have been released, but the devices may still be closing


def _open_in(folder: str) -> list[str]:
    paths = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited
        for descriptor in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                paths.append(os.readlink(f"{folder}/{descriptor}"))
    return paths


def traced(pid: int) -> bool:
    """Return whether a debugger is attached."""
    return _status(pid)[0] != 0


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for this signal. If it has none, the signal would end the process."""
    return bool(_status(pid)[1] >> (number - 1) & 1)


def thread_of(pid: int, thread: int) -> ThreadStatus | None:
    """Return the status of a thread, or None if it does not exist."""
    try:
        return parse_thread(_read(f"/proc/{pid}/task/{thread}/status"))
    except (OSError, ValueError):
        return None


def threads_of(pid: int) -> list[ThreadStatus]:
    """Return all threads of a process. The list is empty if the process does not exist."""
    try:
        found = [thread_of(pid, int(name)) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
    return [thread for thread in found if thread is not None]


def frozen(pid: int) -> bool:
    """Return whether a cgroup of a process is frozen. The kernel shows such a process as sleeping."""
    try:
        files = parse_cgroup(_read(f"/proc/{pid}/cgroup"), _mounts())
    except OSError:
        return False
    return any(is_frozen(_read_or_nothing(file)) for file in files)


def cannot_run(pid: int, last: Stat | None) -> tuple[str, Stat]:
    """Return why a process cannot run now (empty if it can), and its current Stat.

    Args:
        pid: process ID.
        last: the Stat of the previous check, or None.
    """
    stat = stat_of(pid)
    if stat.state == STOPPED:
        # A process that was stopped by a debugger does not count as frozen.
        return ("" if traced(pid) else "stopped by a signal such as SIGSTOP"), stat
    moved = last is None or stat.ticks != last.ticks
    if stat.state in "SD" and not moved and frozen(pid):
        return "its cgroup is frozen", stat
    return "", stat


def samples_of(pids: Collection[int]) -> dict[int, ProcSample]:
    """Return a sample of each process and its session, from one pass over /proc."""
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
        pid: ProcSample(
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
            # One read may return only part of the content.
            _known_mounts = parse_mounts(file.read())
    return _known_mounts


_known_mounts: dict[str, str] | None = None


def _read_or_nothing(path: str) -> bytes:
    """Read a file. Return empty bytes if access is denied, as for another user's process."""
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
