"""Process that kills the remaining workers after its agent has exited, and then exits.

The agent, which may be part of the driver's process, starts the reaper in a new session. The reaper's standard input is
a pipe from the agent, with the lines ``+pgid`` and ``-pgid``. When the pipe is closed or the agent's process exits, the
reaper kills all registered sessions with SIGKILL and exits. It is needed because after a ``kill -9`` of the agent,
PDEATHSIG ends the workers but not their children. The reaper imports only a few standard modules, so it starts within
tens of milliseconds and uses little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Collection

# Maximum number of scans of /proc. A process may fork during a scan; the next scan finds the child.
SCANS = 5


def kill_sessions(sessions: Collection[int]) -> None:
    """Kill all processes of these sessions.

    The process groups of the session leaders are killed first, then all other processes. The caller must ensure that
    each session leader is running or a zombie. Otherwise, its ID might have been reused.
    """
    for session in sessions:
        kill_group(session)
    for _ in range(SCANS if sessions else 0):
        members = members_of(sessions)
        if not members:
            return
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def kill_group(pgid: int) -> None:
    """Kill a process group, which may have exited already."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def members_of(sessions: Collection[int]) -> list[int]:
    """Return the running processes of these sessions, read from /proc."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            state, session = state_of(int(name))
            if session in sessions and state not in "ZX":
                members.append(int(name))
    return members


def state_of(pid: int) -> tuple[str, int]:
    """Return the state letter and the session of a process. Return ("X", 0) if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name is in parentheses and may contain any character.
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[3])
    except (OSError, IndexError):
        return "X", 0


def heed(groups: set[int], text: bytes) -> bytes:
    """Apply complete lines of the form ``+pgid`` or ``-pgid`` to ``groups``. Return the incomplete last line."""
    *lines, rest = text.split(b"\n")
    for line in lines:
        if line[:1] == b"+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    return rest


def read_to_end(driver: int, receive: Callable[[bytes], None]) -> None:
    """Pass data from standard input to ``receive`` until the input is closed or the parent process ``driver`` exits."""
    os.set_blocking(0, False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # If pidfds are not available, only the pipe is watched.
        # The pidfd is needed because a forked child of the driver may keep the pipe open.
        poll.register(os.pidfd_open(driver), select.POLLIN)
    gone = False
    while not gone:
        gone = os.getppid() != driver or any(fd != 0 for fd, _ in poll.poll())
        try:
            while text := os.read(0, 65536):
                receive(text)
            return
        except BlockingIOError:
            continue


def watch(driver: int) -> set[int]:
    """Wait until the parent process ``driver`` exits. Return the process groups that are still registered."""
    groups: set[int] = set()
    rest = b""

    def receive(text: bytes) -> None:
        nonlocal rest
        rest = heed(groups, rest + text)

    read_to_end(driver, receive)
    return groups


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kill_sessions(watch(int(sys.argv[1])))


if __name__ == "__main__":
    main()
