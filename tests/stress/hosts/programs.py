"""A program on a host."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.job import MARK
from harness.processes import clean_environment, path_of_tests
from harness.program import Program
from stress.hosts.namespaces import Host

END_S = 15.0  # seconds for a killed program to end
SHOWN = 25  # lines of its output


class HostProgram(Program):
    """A running program, started by the constructor; its output is also in FOLDER/NAME.log."""

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
        super().__init__(
            words,
            folder=folder,
            env=clean_environment() | path_of_tests() | dict(env or {}),
            mark=MARK,
            called=name,
            log=folder / f"{name}.log",
            popen=host.popen,
        )

    def signal(self, number: int) -> float:
        """Send a signal, if it has not ended. Return the time on the monotonic clock."""
        at = time.monotonic()
        # Not os.kill: once the process was waited for, another one may have its ID.
        self.process.send_signal(number)
        return at

    def kill(self) -> float:
        """Kill it alone; its children may live on. Return the time on the monotonic clock."""
        at = self.signal(signal.SIGKILL)
        self.process.wait(END_S)
        return at

    def tail(self) -> str:
        return "\n".join(f"  {self.name} | {line}" for line in self.lines[-SHOWN:])
