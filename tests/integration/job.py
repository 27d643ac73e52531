"""A real job under test: `elasticrun` in a session of its own, its output, its journal and its processes.

Every process of the job inherits one environment variable with a unique value. By it they're all found again, orphans
included: `end` leaves none alive and returns those that should have been gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.chaos.invariants import Summary, check_journal
from elastic.driver.journal import read

MARK = "ELASTIC_TEST_JOB"
GRACE_S = 10.0  # for the driver to end its job after SIGTERM
LINGER_S = 3.0  # for the last processes to go once the driver has
SHOWN_LINES = 60

Json = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """A live process of the job."""

    pid: int
    state: str  # as in /proc: R running, S sleeping, T stopped, ...
    command: str


class Job:
    """Starts at once: ``flags`` go to elasticrun, ``command`` is what workers run; strings are split like a shell's.

    Every wait has a deadline and fails with an AssertionError that shows the end of the output.
    """

    def __init__(
        self,
        flags: str | Sequence[str],
        command: str | Sequence[str | Path],
        *,
        folder: Path,
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.journal = folder / "journal.jsonl"
        self.unchecked = ""  # why its journal may break an invariant; empty: it must not
        self._mark = uuid.uuid4().hex
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._output_ended = False
        self.driver = subprocess.Popen(
            [elasticrun(), *split(flags), "--journal", str(self.journal), *split(command)],
            cwd=folder,
            env=self._environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="job output", daemon=True)
        self._reader.start()

    # ---- what it prints

    @property
    def lines(self) -> list[str]:
        """What driver and workers have printed so far, in order."""
        with self._news:
            return list(self._lines)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 30.0, *, count: int = 1) -> re.Match[str]:
        """The ``count``-th line that the regular expression is found in; those already printed count too."""
        expression = re.compile(pattern)
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                matches = [m for line in self._lines if (m := expression.search(line))]
                if len(matches) >= count:
                    return matches[count - 1]
                left = deadline - time.monotonic()
                awaited = f"line {count} with {pattern!r} ({len(matches)} seen)"
                assert not self._output_ended, self._story(f"the job ended without {awaited}")
                assert left > 0, self._story(f"waited {timeout} s for {awaited}")
                self._news.wait(left)

    def wait(self, timeout: float = 60.0) -> int:
        """The driver's exit status, once all output has been read."""
        try:
            code = self.driver.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._story(f"the job didn't end in {timeout} s")) from None
        self._reader.join(LINGER_S)
        return code

    def succeed(self, timeout: float = 60.0) -> None:
        """Waits for the end and asserts that it was success."""
        code = self.wait(timeout)
        assert code == 0, self._story(f"elasticrun exited with {code}")

    # ---- what it decided

    def records(self) -> list[Json]:
        """The journal so far: ``{"at": ..., "event": {...}, "actions": [...]}``, without a line still being written."""
        if not self.journal.exists():
            return []
        whole, _, _ = self.journal.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line]

    def events(self, kind: str) -> list[Json]:
        """The events of a type so far, e.g. ``WorkerConnected``."""
        return [
            record["event"]
            for record in self.records()
            if record.get("event") and record["event"]["type"] == kind
        ]

    def actions(self, kind: str) -> list[Json]:
        """The actions of a type so far, e.g. ``PublishWorld``."""
        return [
            action
            for record in self.records()
            for action in record.get("actions") or []
            if action["type"] == kind
        ]

    def worlds(self) -> list[Json]:
        """Every world published so far, oldest first."""
        return self.actions("PublishWorld")

    def wait_for_action(self, kind: str, timeout: float = 30.0, *, count: int = 1) -> Json:
        """The ``count``-th action of a type in the journal."""
        self.until(
            lambda: len(self.actions(kind)) >= count, f"{count} x {kind} in the journal", timeout
        )
        return self.actions(kind)[count - 1]

    def wait_for_world(self, size: int, timeout: float = 30.0) -> Json:
        """The newest world, once it has ``size`` members."""

        def found() -> bool:
            worlds = self.worlds()
            return bool(worlds) and len(worlds[-1]["members"]) == size

        self.until(found, f"a world of {size}", timeout)
        return self.worlds()[-1]

    def until(self, true: Callable[[], bool], awaited: str, timeout: float = 30.0) -> None:
        """Looks every 10 ms until it is true; fails at the deadline, or if the job ends first."""
        deadline = time.monotonic() + timeout
        while True:
            over = self.driver.poll() is not None
            if true():
                return
            assert not over, self._story(f"the job ended without {awaited}")
            assert time.monotonic() < deadline, self._story(f"waited {timeout} s for {awaited}")
            time.sleep(0.01)

    # ---- its processes

    def pid(self, rank: int) -> int:
        """The process that has this rank in the newest world."""
        worlds = self.worlds()
        assert worlds, self._story("no world has been published")
        workers = [member["worker"] for member in worlds[-1]["members"]]
        assert rank < len(workers), self._story(f"the world has no rank {rank}")
        connected = {tuple(e["worker"]): int(e["pid"]) for e in self.events("WorkerConnected")}
        return connected[tuple(workers[rank])]

    def kill(self, rank: int, with_signal: int = signal.SIGKILL) -> int:
        """Sends a signal to the process with this rank in the newest world; returns its pid."""
        pid = self.pid(rank)
        os.kill(pid, with_signal)
        return pid

    def processes(self) -> list[Process]:
        """Every process of the job that is alive, wherever it stands in the process tree."""
        return list(marked(f"{MARK}={self._mark}"))

    def end(self) -> list[Process]:
        """Ends the job if it still runs. Returns the processes that outlived it, killed by now."""
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGCONT)
            self.driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it's among the leftovers
                self.driver.wait(GRACE_S)
        deadline = time.monotonic() + LINGER_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        # A process that forks while it's being looked for is met in the next round.
        while alive := self.processes():
            for process in alive:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.driver.poll()
            time.sleep(0.02)
        self.driver.wait(GRACE_S)
        self._reader.join(LINGER_S)
        if self.driver.stdout is not None and not self._reader.is_alive():
            self.driver.stdout.close()
        return left

    def check_invariants(self) -> Summary | None:
        """What must hold in every job; see `elastic.chaos.invariants`. None where there is no journal to check."""
        if self.unchecked or not self.journal.exists() or not read(self.journal)[1]:
            return None
        # Only a driver that was killed itself has not said how its job ended.
        return check_journal(self.journal, ended=self.driver.returncode >= 0)

    # ---- inside

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        """Ours without traces of another job; the environment's programs, and one thread per process."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ELASTIC_", "HOROVOD_"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
        return clean | {"PATH": path, "OMP_NUM_THREADS": "1", MARK: self._mark} | extra

    def _read(self) -> None:
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._output_ended = True
            self._news.notify_all()

    def _story(self, trouble: str) -> str:
        with self._news:
            shown = self._lines[-SHOWN_LINES:]
        return "\n  ".join([f"{trouble}; its last lines (journal: {self.journal}):", *shown])


def elasticrun() -> str:
    """The installed command beside the interpreter that runs the tests."""
    command = Path(sys.executable).with_name("elasticrun")
    assert command.exists(), f"{command} isn't installed; run: make install"
    return str(command)


def split(words: str | Sequence[str | Path]) -> list[str]:
    return shlex.split(words) if isinstance(words, str) else [str(word) for word in words]


def marked(entry: str) -> Iterator[Process]:
    """The live processes whose environment has ``NAME=value``; zombies have none, and don't count."""
    wanted = entry.encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended meanwhile, or isn't ours
        if state not in "ZX":
            yield Process(int(folder.name), state, command.strip())
