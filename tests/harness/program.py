"""A program under test in its own session: its output, its exit, and the processes that it leaves.

All processes that it starts inherit an environment variable with a unique value, by which they are found, including
orphans. `end` kills all of them and returns those that should have exited before.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from harness.forked import Forked
from harness.processes import kill_all, marked

GRACE_S = 10.0  # time to end after SIGTERM
LINGER_S = 3.0  # time for its last processes to exit after its end
SHOWN_LINES = 60
Found = TypeVar("Found")


class Program:
    """Starts at once. Every wait has a deadline and fails with an AssertionError that shows the end of the output.

    ``mark`` is the environment variable by which its processes are found; ``called`` what messages call it. ``forked``:
    it is `elasticrun`, and comes from a process that has imported torch, and ``modules``; see `harness.forking`.
    ``log`` receives a copy of the output. ``popen`` starts it, like `subprocess.Popen`.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str],
        mark: str,
        called: str = "the program",
        forked: bool = False,
        modules: Sequence[str] = (),
        log: Path | None = None,
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        self._called = called
        self._forked = forked
        self._modules = modules
        self._mark = f"{mark}={uuid.uuid4().hex}"
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._output_ended = False
        self._log = log
        self._popen = popen
        self.process = self._start(words, folder, env)
        self._reader = threading.Thread(target=self._read, name="program output", daemon=True)
        self._reader.start()

    # ---- output

    @property
    def lines(self) -> list[str]:
        """Return the output of the program and its children so far, in order."""
        with self._news:
            return list(self._lines)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 30.0, *, count: int = 1) -> re.Match[str]:
        """Wait for the ``count``-th line that matches the regular expression; earlier lines count, too."""
        expression = re.compile(pattern)
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                matches = [m for line in self._lines if (m := expression.search(line))]
                if len(matches) >= count:
                    return matches[count - 1]
                left = deadline - time.monotonic()
                awaited = f"line {count} with {pattern!r} ({len(matches)} seen)"
                assert not self._output_ended, self._story(
                    f"{self._called} ended without {awaited}"
                )
                assert left > 0, self._story(f"waited {timeout} s for {awaited}")
                self._news.wait(left)

    def until(
        self, found: Callable[[], Found | None], awaited: str, timeout: float = 30.0
    ) -> Found:
        """Poll a function every 10 ms. Fails at the deadline, or if the program ends first."""
        deadline = time.monotonic() + timeout
        while True:
            over = self.process.poll() is not None
            if value := found():
                return value
            assert not over, self._story(f"{self._called} ended without {awaited}")
            assert time.monotonic() < deadline, self._story(f"waited {timeout} s for {awaited}")
            time.sleep(0.01)

    def wait(self, timeout: float = 60.0) -> int:
        """Return its exit status, once all output has been read."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            trouble = f"{self._called} didn't end in {timeout} s"
            raise AssertionError(self._story(trouble)) from None
        self._reader.join(LINGER_S)
        return code

    def succeed(self, timeout: float = 60.0) -> str:
        """Wait for success at the end, and return the output."""
        code = self.wait(timeout)
        assert code == 0, self._story(f"{self._called} exited with {code}")
        return self.output

    # ---- processes

    def processes(self) -> list[psutil.Process]:
        """Return all its live processes, anywhere in the process tree."""
        return list(marked(self._mark))

    def end(self) -> list[psutil.Process]:
        """End it if it still runs. Returns the processes that outlived it, which are killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is among the leftovers
                self.process.wait(GRACE_S)
        deadline = time.monotonic() + LINGER_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        kill_all(self.processes)
        self.process.wait(GRACE_S)
        self._reader.join(LINGER_S)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        return left

    # ---- implementation

    def _start(
        self, words: Sequence[str], folder: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[str] | Forked:
        if self._forked:
            return Forked(words, folder=folder, env=env, mark=self._mark, modules=self._modules)
        name, _, value = self._mark.partition("=")
        return self._popen(
            words,
            cwd=folder,
            env={**env, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        with open(self._log or os.devnull, "a", buffering=1) as log:
            for line in self.process.stdout:
                log.write(line)
                with self._news:
                    self._lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._output_ended = True
            self._news.notify_all()

    def _story(self, trouble: str) -> str:
        with self._news:
            shown = self._lines[-SHOWN_LINES:]
        return "\n  ".join([f"{trouble}; {self._shown()}:", *shown])

    def _shown(self) -> str:
        return "its last lines"


def output_of(*words: object, timeout: float = 100.0, **how: Any) -> str:
    """Run a program to its end, which must be a success, and return its output with stderr."""
    return stdout_of(*words, timeout=timeout, stderr=subprocess.STDOUT, **how)


def stdout_of(
    *words: object, timeout: float = 100.0, stderr: int = subprocess.PIPE, **how: Any
) -> str:
    """Run a program to its end, which must be a success, and return its output without stderr."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=timeout, **how
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr or ''}"
    return done.stdout
