"""A real job under test: `elasticrun`, its output, its journal and its processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.chaos.invariants.invariants import Summary, check_journal
from elastic.driver.events import WorkersReady, WorkersResumed
from elastic.driver.journal.entries import entry_of
from elastic.driver.journal.journal import read
from elastic.driver.reasons import Reason
from harness import forked as forks
from harness.processes import clean_environment
from harness.program import Program

MARK = forks.MARK
ROOT = Path(__file__).parents[2]

Json = dict[str, Any]


class Job(Program):
    """Starts at once: ``flags`` go to elasticrun, ``command`` is what workers run; strings are split like a shell's.

    ``program``: how elasticrun is called, where it is not installed beside the interpreter.
    Every wait has a deadline and fails with an AssertionError that shows the end of the output.
    """

    def __init__(
        self,
        flags: str | Sequence[str],
        command: str | Sequence[str | Path],
        *,
        folder: Path,
        env: dict[str, str] | None = None,
        forked: bool = False,
        modules: Sequence[str] = (),
        program: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.journal = folder / "journal.jsonl"
        self._forget()
        self.unchecked = ""  # why its journal may break an invariant; empty: it must not
        super().__init__(
            [
                *(program or [elasticrun()]),
                *split(flags),
                "--journal",
                str(self.journal),
                *split(command),
            ],
            folder=folder,
            env=clean_environment() | (env or {}),
            mark=MARK,
            called="elasticrun",
            forked=forked,
            modules=modules,
        )
        self.driver = self.process

    # ---- decisions

    def records(self) -> list[Json]:
        """Return the journal so far: ``{"at": ..., "event": {...}, "actions": [...]}``, without an incomplete line."""
        self._read_on()
        return list(self._records)

    def events(self, kind: str) -> list[Json]:
        """Return the events of a type so far, e.g. ``WorkerConnected``."""
        self._read_on()
        return list(self._events[kind])

    def actions(self, kind: str) -> list[Json]:
        """Return the actions of a type so far, e.g. ``PublishWorld``."""
        self._read_on()
        return list(self._actions[kind])

    def _forget(self, inode: int = 0) -> None:
        self._inode, self._told = inode, 0
        self._records: list[Json] = []
        self._events: dict[str, list[Json]] = defaultdict(list)
        self._actions: dict[str, list[Json]] = defaultdict(list)

    def _read_on(self) -> None:
        """Waits poll: lines that were read before are not read again, unless the file was replaced."""
        if not self.journal.exists():
            return self._forget()
        with open(self.journal, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._told:
                self._forget(found.st_ino)
            file.seek(self._told)
            whole, end, _ = file.read().rpartition(b"\n")
        self._told += len(whole) + len(end)
        for record in [json.loads(line) for line in whole.split(b"\n") if line]:
            self._records.append(record)
            if event := record.get("event"):
                for each in _single(event):
                    self._events[each["type"]].append(each)
            for action in record.get("actions") or []:
                self._actions[action["type"]].append(action)

    def fences(self) -> dict[int, Reason]:
        """Return why the worker of each slot was killed."""
        kills = self.actions("KillWorker")
        return {kill["worker"][1]: msgspec.convert(kill["reason"], Reason) for kill in kills}

    def worlds(self) -> list[Json]:
        """Return every world published so far, oldest first."""
        return self.actions("PublishWorld")

    def wait_for_action(self, kind: str, timeout: float = 30.0, *, count: int = 1) -> Json:
        """Wait for the ``count``-th action of a type in the journal."""
        self.until(
            lambda: len(self.actions(kind)) >= count, f"{count} x {kind} in the journal", timeout
        )
        return self.actions(kind)[count - 1]

    def wait_for_world(self, size: int, timeout: float = 30.0) -> Json:
        """Wait for the newest world with ``size`` members."""

        def found() -> bool:
            worlds = self.worlds()
            return bool(worlds) and len(worlds[-1]["members"]) == size

        self.until(found, f"a world of {size}", timeout)
        return self.worlds()[-1]

    # ---- its processes

    def pid(self, rank: int) -> int:
        """Return the process with this rank in the newest world."""
        worlds = self.worlds()
        assert worlds, self._story("no world has been published")
        workers = [member["worker"] for member in worlds[-1]["members"]]
        assert rank < len(workers), self._story(f"the world has no rank {rank}")
        connected = {tuple(e["worker"]): int(e["pid"]) for e in self.events("WorkerConnected")}
        return connected[tuple(workers[rank])]

    def kill(self, rank: int, with_signal: int = signal.SIGKILL) -> int:
        """Send a signal to the process with this rank in the newest world; return its pid."""
        pid = self.pid(rank)
        os.kill(pid, with_signal)
        return pid

    def check_invariants(self) -> Summary | None:
        """What must hold in every job; see `elastic.chaos.invariants.invariants`. None where there is no journal to
        check."""
        if self.unchecked or not self.journal.exists() or not read(self.journal)[1]:
            return None
        # Only a driver that was killed has no end in its journal.
        return check_journal(self.journal, ended=(self.driver.returncode or 0) >= 0)

    def record(self, into: Path, name: str) -> None:
        """Copy its journal, for `harness.kept_journals`. One that may break an invariant is not copied."""
        if not self.unchecked and self.journal.exists():
            text = self.journal.read_bytes()
            for path, shown in (
                (self.folder, "/job"),
                (ROOT, "/hvd-elastic"),
                (sys.prefix, "/venv"),
            ):
                text = text.replace(str(path).encode(), shown.encode())
            (into / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.jsonl").write_bytes(
                text
            )

    def _shown(self) -> str:
        return f"its last lines (journal: {self.journal})"


def elasticrun() -> str:
    """Return the installed command beside the interpreter that runs the tests."""
    command = Path(sys.executable).with_name("elasticrun")
    assert command.exists(), f"{command} isn't installed; run: make install"
    return str(command)


def split(words: str | Sequence[str | Path]) -> list[str]:
    return shlex.split(words) if isinstance(words, str) else [str(word) for word in words]


def _single(event: Json) -> list[Json]:
    """Return the reports of the workers whose host has merged them, and any other event alone."""
    if event["type"] not in ("WorkersReady", "WorkersResumed"):
        return [event]
    merged = entry_of({"event": event}).event
    assert isinstance(merged, WorkersReady | WorkersResumed)
    return [msgspec.to_builtins(each) for each in merged.each()]
