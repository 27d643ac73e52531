"""Discovery by polling: a source is queried at intervals, and its last valid list is kept while queries fail.

A failure and its end are each logged once. An empty list is accepted only after EMPTY_RUNS consecutive empty results,
because a restarting source may return an empty list. Until then, the last list with hosts is kept. Programs run in
their own process group and outside the event loop, so a hanging program does not block the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from elastic.driver.discovery.interface import Log
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.host_lists import show
from elastic.errors import Invalid

QUIET = 30  # number of queries after a logged failure for which other failures are not logged
EMPTY_RUNS = 3  # number of consecutive empty results after which the list becomes empty
OUTPUT_LIMIT = 1 << 20  # maximum number of bytes to keep from each of stdout and stderr


class PolledDiscovery:
    """Discovery that polls ``ask`` every ``interval_s`` seconds.

    While ``ask`` raises `Invalid`, the last list is kept.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[str, int]]],
        log: Log,
        *,
        name: str,
        known: dict[str, int] | None = None,
        interval_s: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._log = log
        self.name = name
        self._known = known
        self._interval_s = interval_s
        self._sleep = sleep

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        if self._known is not None:
            yield dict(self._known)
            await self._sleep(self._interval_s)
        trouble, tries, empty = "", 0, 0
        while True:
            try:
                hosts = await self._ask()
            except Invalid as error:
                empty = 0
                # Limit the logging of failures, because an invalid output may differ at each query.
                tries += 1
                if not trouble or (str(error) != trouble and tries > QUIET):
                    trouble, tries = str(error), 0
                    kept = f"keeping {show(self._known)}" if self._known else "waiting for hosts"
                    self._log("warning", f"{trouble}; {kept}")
            else:
                if trouble:
                    trouble, tries = "", 0
                    self._log("info", f"{self.name} works again")
                empty = 0 if hosts else empty + 1
                if empty and self._known:
                    self._log("warning", self._no_hosts(empty))
                    if empty < EMPTY_RUNS:
                        hosts = self._known
                # Compare the order as well, because hosts are in order of preference.
                if self._known is None or list(hosts.items()) != list(self._known.items()):
                    self._known = hosts
                    yield dict(hosts)
            await self._sleep(self._interval_s)

    def _no_hosts(self, runs: int) -> str:
        start = f"{self.name} printed no host"
        if runs < EMPTY_RUNS:
            return f"{start} ({runs} of {EMPTY_RUNS} runs); keeping {show(self._known or {})}"
        return f"{start} in {runs} runs: no workers are started until it lists a host"


class _Output:
    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)
        self._kept = bytearray()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.writer)

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return False
        self._kept += data[: OUTPUT_LIMIT - len(self._kept)]
        return bool(data)

    def bytes(self) -> bytes:
        """Return the output so far, up to OUTPUT_LIMIT bytes. A background process may still be writing."""
        for _ in range(OUTPUT_LIMIT >> 16):
            if not self._read():
                break
        return bytes(self._kept)


async def execute(
    command: list[str], timeout_s: float, *, env: Mapping[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    """Run a command. Return its exit code (or the negative signal number), stdout and stderr.

    Args:
        command: program and arguments.
        timeout_s: time limit, in seconds.
        env: environment of the command (default: that of this process).

    Raises:
        TimeoutError: the command did not end in time.
        OSError: the command cannot be started.
    """
    with _Output() as output, _Output() as errors:
        process = await asyncio.create_subprocess_exec(
            # Let a shell execute the script, because access to the script's file may hang on a network file system,
            # which would block this process.
            *("/bin/sh", "-c", 'exec "$@"', "sh", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.writer,
            stderr=errors.writer,
            env=env,
            start_new_session=True,
        )
        try:
            code = await within(process.wait(), timeout_s)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # Reap the process. If it hangs in the kernel, the event loop will reap it later.
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(process.wait(), 1.0)
        return code, output.bytes(), errors.bytes()
