"""A program on a host whose output goes to a file that is read while it grows.

Every wait has a deadline, and fails with `Late`, which shows the end of the program's output.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elastic.errors import ElasticError
from harness.processes import clean_environment, path_of_tests
from stress.hosts.namespaces import Host

LOOK_S = 0.02
END_S = 15.0  # seconds for a program to react to SIGTERM
SHOWN = 25  # lines of its output


class Late(ElasticError):
    """A wait has timed out. The text contains the awaited event and the present state."""


class Program:
    """A running program, started by the constructor. ``words`` are its arguments; ``said`` is its output file."""

    def __init__(
        self,
        host: Host,
        name: str,
        words: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.name = name
        self.said = folder / f"{name}.log"
        with self.said.open("ab") as output:
            self.process = host.popen(
                words,
                cwd=folder,
                env=clean_environment() | path_of_tests() | dict(env or {}),
                stdout=output,
                stderr=output,
            )

    @property
    def lines(self) -> list[str]:
        return self.said.read_text(errors="replace").splitlines()

    def wait_for(self, pattern: str, timeout: float = 30.0, *, count: int = 1) -> re.Match[str]:
        """Wait for the ``count``-th line that matches the regular expression, including those already written."""
        expression = re.compile(pattern)
        found: list[re.Match[str]] = []

        def seen() -> bool:
            found[:] = [match for line in self.lines if (match := expression.search(line))]
            return len(found) >= count or self.process.poll() is not None

        wait_until(seen, f"{self.name} to say {pattern!r}", timeout, self.tail)
        if len(found) < count:
            raise Late(f"{self.name} ended without {pattern!r}\n{self.tail()}")
        return found[count - 1]

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the exit code, or minus the signal."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Late(f"{self.name} did not end in {timeout:g} s\n{self.tail()}") from None

    def signal(self, number: int) -> float:
        """Send a signal, if it has not ended. Return the time on the monotonic clock."""
        at = time.monotonic()
        # Not os.kill: once the process was waited for, another one may have its ID.
        self.process.send_signal(number)
        return at

    def kill(self) -> float:
        at = self.signal(signal.SIGKILL)
        self.wait()
        return at

    def end(self) -> None:
        """Send SIGTERM, then SIGKILL if it does not exit. Idempotent."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self) -> str:
        return "\n".join(f"  {self.name} | {line}" for line in self.lines[-SHOWN:])


def wait_until(
    true: Callable[[], bool], awaited: str, timeout: float, story: Callable[[], str]
) -> float:
    """Check a condition fifty times a second. Return the time at which it became true. Raises Late."""
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise Late(f"waited {timeout:g} s for {awaited}\n{story()}")
        time.sleep(LOOK_S)
    return time.monotonic()
