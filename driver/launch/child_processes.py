"""Child processes of a starter: sends each child its configuration, waits until it is ready, and reaps it.

Makes no decisions. Each child has its own session, so that it receives neither Ctrl-C nor a terminal's SIGHUP. Its
standard input stays open while this process runs. An agent that must not outlive this process exits when the input is
closed. The exit is detected with a pidfd, because other processes may keep the output open after the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from elastic.driver.launch.starter import READY, Bootstrap, StartFailed
from elastic.driver.network.blocking_calls import within
from elastic.driver.output_interfaces import Log
from elastic.version import __version__

KEPT_BYTES = 64 * 1024  # number of bytes to keep from the end of the output
# maximum number of log lines to forward that an agent prints outside its connection to the driver
MAX_LOGGED_LINES = 20
REAP_S = 1.0
# Environment variables that agents do not inherit from the driver, because their bootstrap contains the values.
WITHHELD = frozenset({"ELASTIC_JOB_SECRET", "ELASTIC_ETCD_PASSWORD"})

_READY = re.compile(rb"%s (\S+)\r?\n" % READY.encode())


_LOGGED = re.compile(r"elastic \| (?:\d\d:\d\d:\d\d \| )?(?:(warning|error): )?(.*)")


def as_logged(line: str) -> tuple[str, str]:
    """Return the level and text of a line of an agent's log.

    A line in another format, for example of a traceback, is a warning.
    """
    if found := _LOGGED.match(line):
        return found[1] or "debug", found[2].strip()
    return ("warning" if line.strip() else "debug"), line[:500]


class ChildProcess:
    """Child process of a starter.

    Once the process is ready, ``on_line`` is called with each line that it prints. ``gone`` is called after the last
    line.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], text: bytes, *, outlives: bool
    ) -> None:
        """Start the process.

        Args:
            command: program and arguments.
            env: environment of the process.
            text: bytes to write to the standard input of the process.
            outlives: whether the process may move to the background and outlive this process.

        Raises:
            OSError: the program cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        # release that the process reports when it is ready; None if it never becomes ready
        self.ready: asyncio.Future[str | None] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.code: int | None = None
        self.outlives = outlives
        self.on_line: Callable[[str], None] = lambda line: None
        self.gone: Callable[[], None] = lambda: None
        self._printed = bytearray()
        self._line = bytearray()
        self._unsent = text
        self._popen = subprocess.Popen(
            list(command),
            env={name: value for name, value in env.items() if name not in WITHHELD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.pid = self._popen.pid
        self._input, self._output = self._popen.stdin, self._popen.stdout
        self._pidfd: int | None = None
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(self._output.fileno(), self._read)
        self._watch()
        self._send()

    def last_output(self) -> str:
        """Return the last part of the output that the process has written to stdout and stderr."""
        return self._printed.decode("utf-8", "replace")

    def hang_up(self) -> None:
        """Close the standard input of the process, as if its parent had exited."""
        if not self._input.closed:
            self._loop.remove_writer(self._input.fileno())
            self._input.close()

    def kill(self) -> None:
        """Send SIGKILL to the process group of the child. No effect if the child has exited."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Release the resources of this object. The process may still be running."""
        self.hang_up()
        self._close_output()
        self._conclude()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._popen.returncode is None:
            # Prevent Popen's warning about a process that is still running.
            self._popen.returncode = 0

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._input.fileno(), self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the process has exited, which `_on_exit` handles
            self._unsent = b""
        self._loop.remove_writer(self._input.fileno())
        if self._unsent:
            self._loop.add_writer(self._input.fileno(), self._send)

    def _read(self) -> bool:
        if self._output.closed:
            return False
        try:
            data = os.read(self._output.fileno(), KEPT_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_output()
            return False
        self._printed += data
        if self.ready.done():
            self._pass_on(data)
        elif found := _READY.search(self._printed):
            self.ready.set_result(found[1].decode("utf-8", "replace"))
            del self._printed[: found.end()]
            self._pass_on(bytes(self._printed))
        del self._printed[:-KEPT_BYTES]
        return True

    def _pass_on(self, data: bytes) -> None:
        *lines, rest = (bytes(self._line) + data).split(b"\n")
        self._line[:] = rest[-KEPT_BYTES:]
        for line in lines:
            # Ignore lines that end with a carriage return, which ssh has written.
            if not line.endswith(b"\r"):
                self.on_line(line.decode("utf-8", "replace"))

    def _close_output(self) -> None:
        if not self._output.closed:
            self._loop.remove_reader(self._output.fileno())
            self._output.close()
            if self.ended.is_set():
                self._conclude()
                self.gone()

    def _conclude(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def _watch(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # some sandboxes forbid pidfds, so wait in a thread instead
            threading.Thread(target=self._wait_in_thread, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    def _wait_in_thread(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        # Ignore the exit of a released process.
        if self._popen.returncode is not None:
            return
        self.code = self._popen.wait()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.hang_up()
        # Limit the number of reads, because a grandchild may keep writing.
        for _ in range(16):
            if not self._read():
                break
        at_its_end = self._output.closed
        self.ended.set()
        if at_its_end:
            self._conclude()
            self.gone()
        elif self.code != 0 or not self.outlives:
            self._close_output()
        # Otherwise, the process has moved to the background, and its child reports through the pipe when it is ready.


class ChildProcesses:
    """All child processes of one starter.

    Args:
        describe: function that returns, for a host and its process, the reason why the process exited after it was
            ready.
        at_once: maximum number of concurrent starts.
        ready_s: time limit for one start in seconds, not counting the time in the queue.
        close_s: seconds for which `close` waits for the processes to exit before it kills them.
    """

    def __init__(
        self,
        log: Log,
        describe: Callable[[str, ChildProcess], str],
        *,
        at_once: int,
        ready_s: float,
        close_s: float,
    ) -> None:
        self._log = log
        self._describe = describe
        self._turns = asyncio.Semaphore(at_once)
        self._ready_s = ready_s
        self._close_s = close_s
        self._all: set[ChildProcess] = set()
        self._left: set[ChildProcess] = set()  # ready processes that may outlive this process
        # ready processes that exit when this process exits, by host
        self._serving: dict[str, ChildProcess] = {}
        self._closed = False

    async def begin(
        self,
        bootstrap: Bootstrap,
        command: Sequence[str],
        env: Mapping[str, str],
        explain: Callable[[ChildProcess, str | None], Awaitable[str]],
        *,
        first: bytes = b"",
    ) -> None:
        """Start ``command`` on a host, send it the bootstrap, and return when the process is ready.

        Args:
            bootstrap: configuration of the agent.
            command: program and arguments.
            env: environment of the process.
            explain: function that returns the reason why a process cannot be used, given the process and the release
                that it reported. The release is None if the process exited before it was ready or was killed at the
                time limit, in which case its ``code`` is None.
            first: bytes to send before the bootstrap.

        Raises:
            StartFailed: the process did not become a usable agent.
            OSError: the program does not exist.
        """
        host = bootstrap.host
        async with self._turns:
            earlier = self._serving.pop(host, None)
            if earlier is not None:
                earlier.gone = partial(self._forget, earlier)
                await self._end([earlier])
            if self._closed:
                raise StartFailed(f"no agent was started on {host}, because the job is ending")
            text = first + msgspec.json.encode(bootstrap) + b"\n"
            process = ChildProcess(command, env, text, outlives=bootstrap.outlives)
            self._all.add(process)
            process.gone = partial(self._forget, process)
            process.on_line = self._line_logger(host)
            try:
                await self._become_ready(bootstrap, process, explain)
            except BaseException:
                process.kill()
                raise

    async def _become_ready(
        self,
        bootstrap: Bootstrap,
        process: ChildProcess,
        explain: Callable[[ChildProcess, str | None], Awaitable[str]],
    ) -> None:
        host = bootstrap.host
        try:
            release = await within(process.ready, self._ready_s)
        except asyncio.TimeoutError:
            release = None
        if self._closed:
            raise StartFailed(f"no agent was started on {host}, because the job is ending")
        if release != __version__:
            raise StartFailed(await explain(process, release))
        if process.outlives:
            if process in self._all:  # the process may have moved to the background already
                self._left.add(process)
                process.hang_up()
        elif process.ended.is_set():  # the process exited immediately after it was ready
            self._lost(host, process)
        else:
            self._serving[host] = process
            process.gone = partial(self._lost, host, process)

    def _line_logger(self, host: str) -> Callable[[str], None]:
        left = iter(range(MAX_LOGGED_LINES, 0, -1))

        def log_line(line: str) -> None:
            level, text = as_logged(line)
            if level != "debug":
                number = next(left, 0)
                if not number:
                    return
                text += "; further lines are omitted" if number == 1 else ""
            self._log(level, f"the agent on {host}: {text}")

        return log_line

    def _lost(self, host: str, process: ChildProcess) -> None:
        self._forget(process)
        if self._serving.get(host) is process:
            del self._serving[host]
        if not self._closed:
            level = "warning" if process.code else "debug"
            self._log(level, self._describe(host, process))

    def _forget(self, process: ChildProcess) -> None:
        process.release()
        self._all.discard(process)
        self._left.discard(process)

    async def close(self, *, spare: bool) -> None:
        """End all processes. Processes that do not exit in time are killed.

        Args:
            spare: whether to leave processes running that are agents and may outlive this process.
        """
        self._closed = True
        self._serving.clear()
        for process in self._all:
            if not process.ready.done():
                process.kill()
        await self._end(self._all - self._left if spare else set(self._all))
        # The process that has started a spared agent exits by itself, and would remain as a zombie.
        starting = [asyncio.ensure_future(p.ended.wait()) for p in self._left if p.code is None]
        if spare and starting:
            await asyncio.wait(starting, timeout=REAP_S)
        for wait in starting:
            wait.cancel()
        for process in list(self._all):
            self._forget(process)

    async def _end(self, processes: Collection[ChildProcess]) -> None:
        for process in processes:
            process.hang_up()
        for limit_s in (self._close_s, REAP_S):
            waits = [asyncio.ensure_future(p.ended.wait()) for p in processes if p.code is None]
            if not waits:
                return
            _, late = await asyncio.wait(waits, timeout=limit_s)
            for wait in late:
                wait.cancel()
            for process in processes:
                process.kill()
