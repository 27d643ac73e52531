"""Keeps a Python process that has imported what the next worker needs, so that it need not be waited for.

It is started some time after workers were, with their interpreter and environment, and becomes one when it is told what
to run; until then it has one pipe and no thread of ours. Nothing is forked. See `prepared_process`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic.driver.processes import orphan_reaper
from elastic.driver.sinks import Log

PROGRAM = (
    "import sys; sys.path[:1] = sys.argv[1:2];"
    " from elastic.driver.processes.prepared_process import main; main()"
)
PREPARED = "ELASTIC_PREPARED"  # in the environment of one, as the kernel shows it to others: it names no worker
QUIET_S = 3.0  # after the last start: workers that are starting need the processors themselves
ROOM = "." * 4096  # bytes for the command line of what is run later
# Variables that say who a worker is: init() and scripts read them, and no import.
OWN = ("HOROVOD_", "ELASTIC_", "TORCHELASTIC_")
PLACES = {
    f"{prefix}{name}"
    for name in ("RANK", "WORLD_SIZE")
    for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")
}

DEATH_S = 1.0  # from SIGKILL to the end; the driver does nothing else meanwhile

# Of a command, environment, folder and the descriptors that are kept open; raises as `spawning.spawn` does.
Spawn = Callable[
    [Sequence[str], Mapping[str, str], "str | None", Sequence[int]], "subprocess.Popen[bytes]"
]
Plain = tuple[str, bool, list[str]]  # the interpreter, whether unbuffered, and what it runs


def plain(command: Sequence[str]) -> Plain | None:
    """Of ``python [-u] SCRIPT.py ...`` or ``python [-u] -m MODULE ...``; None: it is something else."""
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
    """What imports may have read."""
    return {
        name: text
        for name, text in environ.items()
        if not name.startswith(OWN) and name not in PLACES
    }


@dataclass
class _Kept:
    """The process that waits, and what it can become."""

    process: subprocess.Popen[bytes]
    told: int  # our end of its pipe
    what: int  # a file in memory
    plain: Plain
    environ: dict[str, str]


class Prepared:
    """Of one host, at most one at a time. ``modules``: see `prepared_process`; empty: none is kept.

    ``spawn`` starts it as workers are started; ``gone`` is told the number of one that is not needed and has ended.
    """

    def __init__(
        self, modules: str, *, spawn: Spawn, gone: Callable[[int], None], log: Log
    ) -> None:
        self.modules = modules
        self._spawn = spawn
        self._gone = gone
        self._log = log
        self._kept: _Kept | None = None
        self._next: asyncio.TimerHandle | None = None
        self._said: set[str] = set()

    def take(
        self, command: Sequence[str], environ: Mapping[str, str], folder: str | None
    ) -> subprocess.Popen[bytes] | None:
        """The process that becomes this worker; None: none can, and it is to be started. Keeps another afterwards."""
        if not self.modules:
            return None
        kept, self._kept = self._kept, None
        wanted = plain(command)
        self._later(command, environ, folder)
        if kept is None:
            return None
        why = self._unfit(kept, wanted, environ)
        if why:
            if why not in self._said:
                self._said.add(why)
                self._log("info", f"a worker is started anew, not from the prepared process: {why}")
            self._end(kept)
            return None
        with open(kept.what, "wb") as file:
            assert wanted is not None
            file.write(json.dumps([[*command], wanted[2], dict(environ), folder]).encode())
        os.write(kept.told, b"!")
        os.close(kept.told)
        return kept.process

    def _unfit(self, kept: _Kept, wanted: Plain | None, environ: Mapping[str, str]) -> str:
        if wanted is None or wanted[:2] != kept.plain[:2]:
            return "it runs another program"
        now = shared(environ)
        if now != kept.environ:
            odd = {n for n in now.keys() | kept.environ.keys() if now.get(n) != kept.environ.get(n)}
            return f"its environment differs in {', '.join(sorted(odd)[:4])}"
        return "" if kept.process.poll() is None else "that has ended"

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
        if found is None or self._kept is not None:
            return
        interpreter, unbuffered, words = found
        here = os.path.abspath(folder or os.curdir)
        script = "" if words[0] == "-m" else os.path.join(here, words[0])
        first = os.path.dirname(os.path.realpath(script)) if script else here
        hears, told = os.pipe()
        what = os.memfd_create("told")
        program = [interpreter, *["-u"][: int(unbuffered)], "-c", PROGRAM]
        arguments = [first, str(hears), str(what), self.modules, script, ROOM]
        try:
            marked = {**environ, PREPARED: "1"}
            process = self._spawn([*program, *arguments], marked, folder, (hears, what))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._log("debug", f"no process is prepared: {error}")
            os.close(told)
            os.close(what)
        else:
            self._kept = _Kept(process, told, what, found, shared(environ))
        finally:
            os.close(hears)

    def _end(self, kept: _Kept) -> None:
        os.close(kept.told)
        os.close(kept.what)
        for pipe in (kept.process.stdout, kept.process.stderr):
            if pipe is not None:
                pipe.close()
        if kept.process.returncode is None:
            orphan_reaper.kill_group(kept.process.pid)
            try:
                kept.process.wait(DEATH_S)
            except subprocess.TimeoutExpired:
                self._log(
                    "warning",
                    f"the prepared process {kept.process.pid} can't be killed; leaving it",
                )
                return
        self._gone(kept.process.pid)

    def close(self) -> None:
        """Ends the one that waits."""
        if self._next is not None:
            self._next.cancel()
        if self._kept is not None:
            self._end(self._kept)
            self._kept = None
