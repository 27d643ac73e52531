"""Agent's side of the orphan reaper, which keeps one reaper running and sends it the workers' process groups.

Makes no decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from elastic.driver.output_interfaces import Log
from elastic.driver.processes import orphan_reaper_program


class OrphanReaper:
    """Manager of an agent's orphan reaper. It starts the reaper when needed and replaces it when it exits.

    ``groups`` returns all current process groups, which are sent to a new reaper.
    """

    # An exit within this many seconds after the start counts as a failure.
    QUICK_S = 1.0
    ATTEMPTS = 3  # number of consecutive failures after which no further reaper is started

    def __init__(
        self, loop: asyncio.AbstractEventLoop, groups: Callable[[], list[int]], log: Log
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._log = log
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._started_at = 0.0
        self._quick_deaths = 0

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen else None

    def ensure(self) -> None:
        """Start a reaper, unless one is running or ATTEMPTS consecutive starts have failed."""
        if self._popen is not None or self._quick_deaths >= self.ATTEMPTS:
            return
        # All standard streams are redirected, because a reaper must not keep the driver's terminal or pipes open.
        command = [
            sys.executable,
            "-I",
            "-S",
            str(Path(orphan_reaper_program.__file__)),
            str(os.getpid()),
        ]
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._give_up(f"{sys.executable!r} cannot be started: {error.strerror}")
            return
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._started_at = self._loop.time()
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(self._popen.pid)
            self._loop.add_reader(self._pidfd, self._on_exit)
        if groups := self._groups():
            self.send("".join(f"+{group}\n" for group in groups))

    def send(self, line: str) -> None:
        """Send one or more lines to the reaper.

        If the reaper does not read them, it is replaced, and the new reaper receives all groups.
        """
        if self._popen is None:
            return
        assert self._popen.stdin is not None
        data = line.encode()
        try:
            complete = os.write(self._popen.stdin.fileno(), data) == len(data)
        except OSError:  # The reaper has exited, or its pipe is full because it is stopped.
            complete = False
        if not complete:
            self._popen.kill()
            self._on_exit()

    def announce(self, pid: int) -> None:
        """Register a child process with the reaper.

        Called in the child between fork and exec, so that every child is registered before its program runs.
        """
        if self._popen is None or self._popen.stdin is None:
            return
        # subprocess has reset SIGPIPE to the default action, which would end the child.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            os.write(self._popen.stdin.fileno(), f"+{pid}\n".encode())
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    def _on_exit(self) -> None:
        self._release(timeout_s=5.0)
        quick = self._loop.time() - self._started_at < self.QUICK_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        if self._quick_deaths == self.ATTEMPTS:
            self._give_up(f"it exited {self.ATTEMPTS} consecutive times")
        elif self._groups():
            self.ensure()

    def _give_up(self, reason: str) -> None:
        self._quick_deaths = self.ATTEMPTS
        self._log(
            "warning",
            f"the orphan reaper is not running: {reason}; children of workers may outlive a killed driver",
        )

    def _release(self, timeout_s: float) -> None:
        if self._popen is None:
            return
        self._unwatch()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen = None

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def close(self) -> None:
        """Close the pipe to the reaper, which then kills the remaining sessions and exits."""
        if self._popen is None:
            return
        self._unwatch()  # Otherwise, the exit of this reaper would start another one.
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        deadline = self._loop.time() + 5.0
        while self._popen.poll() is None and self._loop.time() < deadline:
            await asyncio.sleep(0.002)
        self._release(timeout_s=0.0)
