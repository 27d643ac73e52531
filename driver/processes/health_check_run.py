"""Runner of a slot's health check, in parallel with the start of its worker. Makes no decisions.

The check runs in a separate session, which is killed at the time limit or when the worker exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from elastic.driver.events import HealthOutcome, WorkerHealthChecked
from elastic.driver.processes import orphan_reaper_program
from elastic.driver.processes.spawning import why_not_started
from elastic.driver.settings import AUTO
from elastic.errors import shortened
from elastic.health.exit_codes import WRONG_RESULT
from elastic.protocol.messages import Worker

COMMAND, TIMEOUT = "ELASTIC_HEALTH_CHECK", "ELASTIC_HEALTH_CHECK_TIMEOUT"
# Runs the module like python -m, but does not import from the working directory.
RUN_AUTO = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    " import runpy; runpy.run_module('elastic.health.check', None, '__main__', True)"
)
KEPT_BYTES = 4096  # number of bytes kept from the end of the check's output
LINE = 200  # maximum number of characters reported from the last line of the output
# Variables that the check does not receive: secrets, the worker's life lock, and the pipe for its exceptions.
WITHHELD = frozenset(
    {"ELASTIC_SECRET", "ELASTIC_TLS_KEY", "ELASTIC_LIFE_LOCK", "ELASTIC_DIAGNOSTICS"}
)
Spawn = Callable[[Sequence[str], Mapping[str, str], "str | None"], "subprocess.Popen[bytes]"]


def command_of(check: str, worker_command: Sequence[str]) -> list[str]:
    """Return the command of a health check.

    The built-in check uses the worker's Python interpreter, if the worker's command names one.
    """
    if check != AUTO:
        return ["sh", "-c", check]
    program = worker_command[0] if worker_command else ""
    python = program if os.path.basename(program).startswith("python") else sys.executable
    return [python, "-c", RUN_AUTO]


def without_check(env: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment without the variables for its health check.

    The worker may start another job, to which this health check must not apply.
    """
    return {name: value for name, value in env.items() if name not in (COMMAND, TIMEOUT)}


def environment_of(worker: Worker, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a health check.

    It is the worker's environment without secrets, with additional variables for the host and the slot.
    """
    kept = {name: value for name, value in env.items() if name not in WITHHELD}
    return {**kept, "ELASTIC_HOST": worker.host, "ELASTIC_SLOT": str(worker.slot)}


class HealthCheckRun:
    """One run of a health check.

    Args:
        done: called once with the result, unless the check is cancelled first.
        reaped: called with the process ID after the check's process has been reaped.
    """

    def __init__(
        self,
        worker: Worker,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: str | None,
        *,
        spawn: Spawn,
        done: Callable[[WorkerHealthChecked], None],
        reaped: Callable[[int], None],
    ) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._done: Callable[[WorkerHealthChecked], None] | None = done
        self._reaped = reaped
        self._text = bytearray()
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._alarm: asyncio.TimerHandle | None = None
        # The exit codes of the built-in check have known meanings.
        self._builtin = env[COMMAND] == AUTO
        program = command_of(env[COMMAND], command)
        try:
            self._popen = spawn(program, environment_of(worker, env), folder)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._loop.call_soon(
                self._end, HealthOutcome.FAILED, None, why_not_started(program[0], error)
            )
            return
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._loop.add_reader(stream.fileno(), self._read, stream)
        limit_s = float(env[TIMEOUT])
        self._alarm = self._loop.call_later(limit_s, self._late, limit_s)
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError:  # Some sandboxes forbid pidfds. In that case, a thread waits for the exit.
            threading.Thread(
                target=self._wait_in_thread, args=(self._popen.pid,), daemon=True
            ).start()
        else:
            self._loop.add_reader(self._pidfd, self._exited)

    @property
    def running(self) -> bool:
        """Whether the process of the check has not been reaped yet."""
        return self._popen is not None

    def cancel(self) -> None:
        """Kill the check without reporting a result."""
        self._done = None
        self._kill()

    def _wait_in_thread(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(self._exited)

    def _read(self, stream: object) -> bool:
        if stream.closed:  # type: ignore[attr-defined]
            return False
        try:
            data = os.read(stream.fileno(), KEPT_BYTES)  # type: ignore[attr-defined]
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(stream.fileno())  # type: ignore[attr-defined]
            stream.close()  # type: ignore[attr-defined]
        self._text += data
        del self._text[:-KEPT_BYTES]
        return bool(data)

    def _late(self, limit_s: float) -> None:
        """Report the timeout, then kill the check.

        The report does not wait for the exit, because a process that is blocked in the kernel does not react to
        SIGKILL.
        """
        self._end(HealthOutcome.TIMED_OUT, None, self._last_line() or f"no result in {limit_s:g} s")
        self._kill()

    def _kill(self) -> None:
        if self._popen is not None:
            orphan_reaper_program.kill_group(self._popen.pid)

    def _exited(self) -> None:
        popen, self._popen = self._popen, None
        if popen is None:
            return
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for stream in (popen.stdout, popen.stderr):
            # Limit the number of reads, because another process may keep writing.
            for _ in range(16):
                if not self._read(stream):
                    break
            if stream is not None and not stream.closed:
                self._loop.remove_reader(stream.fileno())
                stream.close()
        orphan_reaper_program.kill_sessions({popen.pid})
        self._reaped(popen.pid)
        code = popen.wait()  # the process is a zombie, so this call returns immediately
        outcome = HealthOutcome.FAILED if code else HealthOutcome.PASSED
        if self._builtin and code == WRONG_RESULT:
            outcome = HealthOutcome.WRONG_RESULT
        self._end(outcome, code, self._last_line())

    def _end(self, outcome: HealthOutcome, code: int | None, line: str) -> None:
        done, self._done = self._done, None
        if self._alarm is not None:
            self._alarm.cancel()
        if done is not None:
            took_s = round(self._loop.time() - self._began, 3)
            done(WorkerHealthChecked(self._worker, outcome, code, shortened(line)[:LINE], took_s))

    def _last_line(self) -> str:
        lines = self._text.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
