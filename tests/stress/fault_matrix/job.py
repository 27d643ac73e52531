"""One job of the fault matrix: its processes, its journal and the files with its failpoint rules.

Faults and their expected ends are decided elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from elastic.chaos.harness.journal_tail import JournalTail, Json
from elastic.chaos.invariants.invariants import BrokenInvariant, check_journal
from harness.forked import Forked
from harness.job import MARK, elasticrun
from harness.processes import clean_environment, kill_all, path_of_tests
from harness.program import Program
from stress.fault_matrix.expectations import GONE_S, WORKERS, JobKind
from stress.fault_matrix.journal_facts import JournalFacts

END_S = 30.0  # time for a job to end after the request
LOOK_S = 0.01
SLOTS = 64  # enough for workers that must not return to their slot
SMALL_DISK_BYTES = 16 << 20
IMPORTED_BYTES = 100 << 20  # memory of a process that has imported torch
TRAINING = "stress.fault_matrix.training"
SHARDED_TRAINING = "stress.fault_matrix.sharded_training"
FLAGS = (
    *("-np", str(WORKERS), "--min-np", "1", "--max-np", str(WORKERS), "-H", f"localhost:{SLOTS}"),
    *("--lease", "0.5", "--idle-timeout", "2", "--busy-warning", "2", "--busy-timeout", "6"),
    *("--elastic-timeout", "30", "--start-timeout", "60"),
    *("--blacklist-cooldown-range", "0.1", "1", "--slot-attempts", "20"),
)
MORE_FLAGS = {
    JobKind.PLAIN: (),
    JobKind.DURABLE: ("--checkpoint-dir", "checkpoints", "--checkpoint-every", "10commits"),
    JobKind.STANDBYS: ("--standbys", "1"),
    JobKind.PREPARED: ("--preload", "torch"),
    JobKind.SHARDED: ("--preload", "torch,torch.distributed.fsdp"),
}


class Unexpected(Exception):
    """A process or job did not end as expected; the message contains the expected and the actual outcome."""


class MatrixJob:
    """A job in its own folder, not started yet: rules can be set before its first workers start."""

    def __init__(
        self,
        folder: Path,
        *,
        kind: JobKind = JobKind.PLAIN,
        small_disk: bool = False,
        shared_memory: bool = True,
        forked: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``forked``: as in `harness.program.Program`. ``env`` is added to the driver's environment."""
        self._kind = kind
        self._forked = forked
        self._env = dict(env or {})
        self.folder = folder
        self.over = folder / "over"  # once this file exists, training ends
        self._shared_memory = shared_memory
        self._rules = folder / "rules"
        self._program: Program | None = None
        self._disk = folder / "disk" if small_disk else None
        if self._disk is not None:
            self._disk.mkdir()
            size = f"size={SMALL_DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", self._disk], check=True)
        self.journal = (self._disk or folder) / "journal.jsonl"
        self.story = JournalFacts()
        self._follower = JournalTail(self.journal, self.story)
        self.arm([])

    def start(self) -> None:
        """Start the driver, which starts the workers."""
        settings = {"ELASTIC_FAILPOINTS": f"@{self._rules}", "ELASTIC_DIGESTS": "1"}
        if not self._shared_memory:
            settings["ELASTIC_NATIVE"] = "0"
        script = SHARDED_TRAINING if self._kind is JobKind.SHARDED else TRAINING
        self._program = Program(
            [
                elasticrun(),
                *FLAGS,
                *MORE_FLAGS[self._kind],
                *("--journal", str(self.journal), sys.executable, "-m", script, str(self.over)),
            ],
            folder=self.folder,
            env=clean_environment() | path_of_tests() | settings | self._env,
            mark=MARK,
            called="elasticrun",
            forked=self._forked,
            log=self.folder / "output.txt",
        )

    @property
    def started(self) -> bool:
        return self._program is not None

    @property
    def program(self) -> Program:
        assert self._program is not None, "the job has not been started"
        return self._program

    @property
    def driver(self) -> subprocess.Popen[str] | Forked:
        return self.program.process

    # ---- rules -----------------------------------------------------------------------------------

    def arm(self, rules: Sequence[str]) -> None:
        """Replace all rules by these."""
        new = self._rules.with_suffix(".new")
        new.write_text("".join(f"{rule}\n" for rule in rules))
        new.rename(self._rules)

    def struck(self, name: str, count: int, within_s: float) -> list[Json]:
        """Wait until all victims of a rule are at their place, and return their reports."""
        paths = [Path(f"{self._rules}.{name}.{n}") for n in range(count)]
        reports: list[Json] = []

        def complete() -> bool:
            # missing or incomplete so far
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                reports[:] = [json.loads(path.read_text()) for path in paths]
            return len(reports) == count

        self.until(complete, f"{count} victims at their place", within_s)
        return reports

    def step(self) -> int:
        """Return the current step of the training."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder / "step").read_text() or 0)
        return 0

    def fill_disk(self) -> None:
        """Fill the journal's disk completely."""
        assert self._disk is not None, "this job's journal has no disk of its own"
        with (self._disk / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(1 << 16)):
                    pass
            except OSError:
                return

    # ---- what can be seen ------------------------------------------------------------------------

    def has_spare(self) -> bool:
        """Return whether the additional process that this job's cells need exists."""
        if self._kind is JobKind.STANDBYS:
            return self.story.stands_by
        if self._kind is JobKind.PREPARED:
            with contextlib.suppress(psutil.Error):
                return any(
                    "preloaded_program" in " ".join(each.info["cmdline"])
                    and each.memory_info().rss > IMPORTED_BYTES
                    for each in self.program.processes()
                )
            return False
        if self._kind is JobKind.DURABLE:
            return self.story.durable
        return True

    def look(self) -> None:
        """Read the new lines of the journal."""
        self._follower.look()

    def must(self, true: bool, trouble: str) -> None:
        """Raise Unexpected with ``trouble`` if the condition is false."""
        if not true:
            raise Unexpected(f"{trouble} ({self.story})")

    def until(
        self,
        true: Callable[[], bool],
        expected: str,
        within_s: float,
        each_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Poll until a condition is true. Raises Unexpected at the deadline, or if the job ends first."""
        deadline = time.monotonic() + within_s
        while True:
            over = self._program is not None and self.driver.poll() is not None
            each_turn()
            self.look()
            if true():
                return
            self.must(not over, f"the job ended without {expected}")
            self.must(time.monotonic() < deadline, f"{within_s:g} s without {expected}")
            time.sleep(LOOK_S)

    # ---- the end ---------------------------------------------------------------------------------

    def ends(self, each_turn: Callable[[], None] = lambda: None) -> int:
        """Return the driver's exit code. Raises Unexpected if it does not exit in time."""
        deadline = time.monotonic() + END_S
        while self.driver.poll() is None:
            each_turn()
            self.must(time.monotonic() < deadline, f"the driver still runs after {END_S:g} s")
            time.sleep(LOOK_S)
        self.look()
        return self.program.wait()

    def nothing_left(self) -> None:
        """Raise Unexpected if processes outlive the driver."""
        deadline = time.monotonic() + GONE_S
        while left := self.program.processes():
            self.must(time.monotonic() < deadline, f"processes are left: {left}")
            time.sleep(LOOK_S)

    def finish(self) -> str:
        """End the job, with success if it still trains. Returns what is wrong with it as a whole, or ""."""
        try:
            killed = self.driver.poll() in (-signal.SIGKILL, -signal.SIGSEGV)
            if self.driver.poll() is None:
                self.over.touch()
                code = self.ends()
                self.must(code == 0, f"elasticrun ended with exit code {code}, not 0")
                self.nothing_left()
            if self._disk is None:
                checked = check_journal(self.journal, ended=not killed)
                trained = checked.samples_counted and checked.commits_compared
                if self._kind is JobKind.SHARDED:  # whose script counts its samples itself
                    trained = checked.shards_restored and checked.commits_compared
                what = "the journal has no samples, shards or digests, so nothing was checked"
                self.must(bool(trained) or self.driver.returncode != 0, what)
        except (Unexpected, BrokenInvariant) as trouble:
            return str(trouble)
        finally:
            self.close()
        return ""

    def close(self) -> None:
        """Kill all processes of the job."""
        if self._program is not None:
            kill_all(self._program.processes)
            self._program.end()
        if self._disk is not None and os.path.ismount(self._disk):
            subprocess.run(["umount", self._disk], check=True)
