"""Programs under test that `harness.forking` has forked. Each process of pytest has one process to fork from."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from elastic.chaos.inject.injector import MARK as CHAOS_MARK
from elastic.driver.launch.worker_environment import defaults
from elastic.driver.processes.preloaded_pool import PREPARED
from harness import forking
from harness.forking import ForkRequest, early, tell

MARK = "ELASTIC_TEST_JOB"
# What /proc shows of a fork's environment, beside what it has of ours: marks of its job, in hexadecimal, and that the
# process was there before it was told to be a worker.
SHOWN = {MARK: forking.ROOM * 32, CHAOS_MARK: forking.ROOM * 16, PREPARED: "1"}
_making = threading.Lock()


class Forked:
    """What tests use of `subprocess.Popen`: its number, too, stays its own until its exit status was read.

    ``mark`` is ``NAME=value``, by which `harness.processes.marked` finds it. ``modules`` have been imported besides
    torch. ``passed``: descriptors that it has from 3 on.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str],
        mark: str,
        modules: Sequence[str] = (),
        passed: Sequence[int] = (),
    ) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        name, _, value = mark.partition("=")
        beginning = early({**defaults(threads=1), **env})  # as workers have it
        source = _Source.of(tuple(beginning.items()), tuple(modules))
        read, write = os.pipe()
        self.stdout: TextIO = os.fdopen(read, encoding="utf-8", errors="replace")
        self._answers, theirs = socket.socketpair()
        told = ForkRequest(self.args, {**env, name: value}, str(folder))
        tell(source.channel, told, [write, theirs.fileno(), *passed])
        os.close(write)
        theirs.close()
        self._said = self._answers.makefile("r")
        number = self._said.readline()
        assert number, "the process that jobs are forked from has ended"
        self.pid = int(number)

    def printed(self) -> str:
        """Return the whole output, once all writers have ended."""
        with self.stdout as stdout:
            return stdout.read()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], timeout)[0]:
            self.returncode = int(self._said.readline())
            self._said.close()
            self._answers.close()  # the process is reaped now
        return self.returncode


class _Source:
    """The process that has imported torch. It ends with its channel."""

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, forking.__file__, str(theirs.fileno()), *modules],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    @classmethod
    def of(cls, beginning: tuple[tuple[str, str], ...], modules: tuple[str, ...]) -> _Source:
        """Return one per kind, for all threads, with room for a mark."""
        with _making:
            return cls._of(beginning, modules)

    @classmethod
    @functools.cache
    def _of(cls, beginning: tuple[tuple[str, str], ...], modules: tuple[str, ...]) -> _Source:
        others = {name: text for name, text in os.environ.items() if name not in early(os.environ)}
        return cls({**others, **dict(beginning), **SHOWN}, modules)
