"""Preloaded processes, which have already imported the modules that the next workers need.

A preloaded process is started QUIET_S seconds after the last worker, with the same interpreter and environment, if the
host has enough memory. It becomes a worker when it receives a command. Until then, it waits for input on a pipe and
runs no threads of this package. Workers are not forked from it. See `preloaded_program`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic.driver.output_interfaces import Log
from elastic.driver.processes import orphan_reaper_program

PROGRAM = (
    "import sys; sys.path[:1] = sys.argv[1:2]; "
    "from elastic.driver.processes.preloaded_program import main; main()"
)
PREPARED = "ELASTIC_PREPARED"  # environment variable that marks a process that is not a worker yet
PADDING = "ELASTIC_PREPARED_ROOM"
AUTO, OFF = "auto", "off"
MOST = 64  # maximum number of preloaded processes
# Minimum available memory for preloading. A process that has imported torch uses 0.3 GB (measured with the CPU build of
# torch 2.13), and a host with less available memory needs it for training.
AVAILABLE_BYTES_MIN = 2 << 30
# Seconds after the last start of a worker at which preloading begins, because starting workers need the CPUs.
QUIET_S = 3.0
# Bytes reserved for the worker's command line and its additional variables.
ROOM = "." * 4096
# Prefixes of variables that identify a worker. init() and scripts read these variables, but imports do not.
OWN = ("HOROVOD_", "ELASTIC_", "TORCHELASTIC_")
PLACES = {
    f"{prefix}{name}"
    for name in ("RANK", "WORLD_SIZE")
    for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")
}

# Seconds to wait for the exit of all preloaded processes after SIGKILL. On a busy host, releasing their memory takes
# time, during which the driver is blocked.
DEATH_S = 10.0
REAP_S = 0.005
LOOK_S = 0.05

# Function that starts a process, given the command, environment, folder and inherited file descriptors. It raises the
# same exceptions as `spawning.spawn`.
Spawn = Callable[
    [Sequence[str], Mapping[str, str], "str | None", Sequence[int]], "subprocess.Popen[bytes]"
]
# the interpreter, whether its output is unbuffered, and the arguments starting with the script or -m
Plain = tuple[str, bool, list[str]]


def plain(command: Sequence[str]) -> Plain | None:
    """Parse a command ``python [-u] SCRIPT.py ...`` or ``python [-u] -m MODULE ...``.

    Returns None for any other command.
    """
    words = [*command]
    program = os.path.basename(words[0]) if words else ""
    if not program.startswith("python"):
        return None
    interpreter, words = words[0], words[1:]
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    is_module = len(words) > 1 and words[0] == "-m"
    if not is_module and not (words and words[0].endswith(".py")):
        return None
    return interpreter, unbuffered, words


def shared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports may read, without the variables that identify a worker."""
    return {
        name: text
        for name, text in environ.items()
        if not name.startswith(OWN) and name not in PLACES
    }


@dataclass
class _Kept:
    """Waiting preloaded process, with the command and environment for which it was started."""

    process: subprocess.Popen[bytes]
    pipe: int  # the driver's end of the pipe to the process
    what: int  # descriptor of an in-memory file for the worker's command
    plain: Plain
    environ: dict[str, str]


def read(wanted: str) -> tuple[list[str], int]:
    """Parse the value of ``--preload``, for example ``auto,transformers,2``.

    Returns:
        The modules and the number of processes (default: 1). The number is 0 for an empty text or ``off``.

    Raises:
        ValueError: a word is not a module name, or the number is out of range or given twice.
    """
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    if words in ([], [OFF]):
        return [], 0
    if OFF in words:
        raise ValueError(
            f"{OFF} can't be combined with modules or numbers: omit {OFF}, or pass only {OFF}"
        )
    names = [word for word in words if not word.isdecimal()]
    for name in names:
        if not all(map(str.isidentifier, name.split("."))):
            raise ValueError(
                f"{name} is not a module name: pass module names or auto, and a number for more than one process"
            )
    counts = [int(word) for word in words if word.isdecimal()]
    if counts and (len(counts) > 1 or not 1 <= counts[0] <= MOST):
        raise ValueError(
            f"the number of processes is out of range or given twice ({', '.join(map(str, counts))}): pass one number"
            f" from 1 to {MOST}"
        )
    return names, counts[0] if counts else 1


class PreparedProcesses:
    """Preloaded processes of one host.

    Args:
        modules: modules to import. Empty means that no process is preloaded.
        spawn: function that starts a process in the same way as a worker.
        gone: called with the process ID when a process exits without having become a worker.
        available: function that returns the available memory of the host or container, in bytes.
        log: called with the level and the text of each log line.
    """

    def __init__(
        self,
        modules: str,
        *,
        spawn: Spawn,
        gone: Callable[[int], None],
        available: Callable[[], int],
        log: Log,
    ) -> None:
        self.modules = modules
        self._available = available
        self._spawn = spawn
        self._gone = gone
        self._log = log
        self._kept: list[_Kept] = []  # waiting processes, oldest first
        # killed processes that have not been reaped yet
        self._killed: list[subprocess.Popen[bytes]] = []
        self._next: asyncio.TimerHandle | None = None
        self._logged: set[str] = set()

    def take(
        self, command: Sequence[str], environ: Mapping[str, str], folder: str | None
    ) -> subprocess.Popen[bytes] | None:
        """Turn a preloaded process into this worker and return it, and schedule a replacement.

        Returns None if no suitable process is available.
        """
        if not self.modules:
            return None
        wanted = plain(command)
        self._later(command, environ, folder)
        if not self._kept:
            return None
        kept = self._kept.pop(0)
        why = self._unfit(kept, wanted, environ)
        if why:
            if why not in self._logged:
                self._logged.add(why)
                self._log("info", f"a worker did not use the preloaded process: {why}")
            self._end(kept)
            self._reap_later()
            return None
        with open(kept.what, "wb") as file:
            assert wanted is not None
            file.write(json.dumps([[*command], wanted[2], dict(environ), folder]).encode())
        os.write(kept.pipe, b"!")
        os.close(kept.pipe)
        return kept.process

    def _unfit(self, kept: _Kept, wanted: Plain | None, environ: Mapping[str, str]) -> str:
        if wanted is None or wanted[:2] != kept.plain[:2]:
            return "it runs another program"
        now = shared(environ)
        if now != kept.environ:
            odd = {n for n in now.keys() | kept.environ.keys() if now.get(n) != kept.environ.get(n)}
            return f"its environment differs in {', '.join(sorted(odd)[:4])}"
        return "" if kept.process.poll() is None else "that no longer exists"

    def _later(
        self, command: Sequence[str], environ: Mapping[str, str], folder: str | None
    ) -> None:
        if self._next is not None:
            self._next.cancel()
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(QUIET_S, self._prepare, [*command], dict(environ), folder)

    def _prepare(self, command: list[str], environ: dict[str, str], folder: str | None) -> None:
        self._next = None
        found = plain(command)
        modules, count = read(self.modules)
        if found is None or len(self._kept) >= count:
            return
        if (available := self._available()) < AVAILABLE_BYTES_MIN:
            self._log(
                "debug",
                f"no process was preloaded: {available / 1000000000.0:.1f} GB of memory are available, but"
                f" {AVAILABLE_BYTES_MIN / 1000000000.0:.1f} GB are needed",
            )
            return
        interpreter, unbuffered, words = found
        here = os.path.abspath(folder or os.curdir)
        module = words[0] == "-m"
        script = f"-m {words[1]}" if module else os.path.join(here, words[0])
        first = here if module else os.path.dirname(os.path.realpath(script))
        reader, writer = os.pipe()
        what = os.memfd_create("told")
        program = [interpreter, *["-u"][: int(unbuffered)], "-c", PROGRAM]
        arguments = [first, str(reader), str(what), ",".join(modules), script, ROOM]
        try:
            marked = {**environ, PREPARED: "1", PADDING: ROOM}
            process = self._spawn([*program, *arguments], marked, folder, (reader, what))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._log("debug", f"no process was preloaded: {error}")
            os.close(writer)
            os.close(what)
        else:
            self._kept.append(_Kept(process, writer, what, found, shared(environ)))
            if len(self._kept) < count:
                self._later(command, environ, folder)
        finally:
            os.close(reader)

    def _end(self, kept: _Kept) -> None:
        os.close(kept.pipe)
        os.close(kept.what)
        for pipe in (kept.process.stdout, kept.process.stderr):
            if pipe is not None:
                pipe.close()
        if kept.process.returncode is None:  # After the exit, the process ID may be reused.
            orphan_reaper_program.kill_group(kept.process.pid)
        self._killed.append(kept.process)

    def _reap_later(self) -> None:
        if self._reap():
            asyncio.get_running_loop().call_later(LOOK_S, self._reap_later)

    def _reap(self) -> bool:
        exited = [process for process in self._killed if process.poll() is not None]
        self._killed = [process for process in self._killed if process not in exited]
        for process in exited:
            self._gone(process.pid)
        return bool(self._killed)

    def close(self) -> None:
        """Kill all waiting processes, and wait at most DEATH_S seconds for their exits."""
        if self._next is not None:
            self._next.cancel()
        while self._kept:
            self._end(self._kept.pop())
        deadline = time.monotonic() + DEATH_S
        while self._reap() and time.monotonic() < deadline:
            time.sleep(REAP_S)
        for process in self._killed:
            state, _ = orphan_reaper_program.state_of(process.pid)
            self._log(
                "warning",
                f"the preloaded process {process.pid} has not exited {DEATH_S:g} s after SIGKILL (state {state})",
            )
