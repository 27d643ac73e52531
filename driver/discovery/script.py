"""Runs a script that prints the available hosts, one ``host`` or ``host:slots`` per line.

If the script fails, hangs or prints invalid lines, the last valid list is kept. The failure and its end are logged
once. A source may print nothing while it restarts, so an empty output does not take effect immediately. After several
consecutive runs without a host, the list becomes empty, and no workers are started.

The script runs in its own process group and outside the event loop, so a script that hangs does not block the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from elastic.driver.discovery.interface import Log
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.hosts import parse_lines, show
from elastic.errors import Invalid

QUIET = 30  # number of attempts for which other failures are not logged
EMPTY_RUNS = 3  # number of consecutive runs without a host after which the list becomes empty
_OUTPUT_LIMIT = 1 << 20  # maximum number of bytes kept from each of stdout and stderr


def find_script(text: str, *, path: str | None = None) -> list[str]:
    """Return the command for ``--host-discovery-script``, a path or a path with arguments. The program is absolute.

    Raises:
        Invalid: the script is missing or not executable.
    """
    try:
        words = [text] if os.path.exists(text) else shlex.split(text)
    except ValueError:
        words = [text]
    script = words[0] if words else text
    local = os.path.abspath(script)
    found = shutil.which(local) or shutil.which(script, path=path)
    if found:
        return [os.path.abspath(found), *words[1:]]
    if os.path.isfile(local):
        raise Invalid(
            f"the discovery script {script} is not executable: run chmod +x {shlex.quote(script)}"
        )
    raise Invalid(
        f"the discovery script {script!r} does not exist: pass the path of an executable file"
    )


class PolledDiscovery:
    """Calls ``ask`` every ``interval_s`` seconds, and keeps the last list while ``ask`` raises `Invalid`.

    Args:
        ask: returns the current list.
        name: name of the source in the log.
        known: list from an earlier call of ``ask``, which is yielded first.
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
        self._name = name
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
                # Log each failure once, not every second, even if invalid output differs each time.
                tries += 1
                if not trouble or (str(error) != trouble and tries > QUIET):
                    trouble, tries = str(error), 0
                    kept = f"keeping {show(self._known)}" if self._known else "waiting for hosts"
                    self._log("warning", f"{trouble}; {kept}")
            else:
                if trouble:
                    trouble, tries = "", 0
                    self._log("info", f"{self._name} works again")
                empty = 0 if hosts else empty + 1
                if empty and self._known:
                    self._log("warning", self._no_hosts(empty))
                    if empty < EMPTY_RUNS:
                        hosts = self._known
                # The order expresses preference, so a different order is a change.
                if self._known is None or list(hosts.items()) != list(self._known.items()):
                    self._known = hosts
                    yield dict(hosts)
            await self._sleep(self._interval_s)

    def _no_hosts(self, runs: int) -> str:
        start = f"{self._name} printed no host"
        if runs < EMPTY_RUNS:
            return f"{start} ({runs} of {EMPTY_RUNS} runs); keeping {show(self._known or {})}"
        return f"{start} in {runs} runs: no workers are started until it lists a host"


class ScriptDiscovery(PolledDiscovery):
    """Runs ``command`` every ``interval_s`` seconds; a run may take ``timeout_s`` seconds.

    Args:
        known: list from an earlier run (see `ask`), which is yielded first.
    """

    def __init__(
        self,
        command: list[str],
        log: Log,
        *,
        default_slots: int = 1,
        known: dict[str, int] | None = None,
        interval_s: float = 1.0,
        timeout_s: float = 10.0,
        ask: Callable[[], Awaitable[dict[str, int]]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(
            ask or self.ask,
            log,
            name=f"discovery script {command[0]}",
            known=known,
            interval_s=interval_s,
            sleep=sleep,
        )
        self._command = command
        self._default_slots = default_slots
        self._timeout_s = timeout_s

    async def ask(self) -> dict[str, int]:
        """Run the script once, and return the list that it prints.

        Raises:
            Invalid: there is no valid list.
        """
        try:
            code, output, errors = await execute(self._command, self._timeout_s)
        except asyncio.TimeoutError:
            raise Invalid(f"{self._name} did not finish within {self._timeout_s:g} s") from None
        except OSError as error:
            raise Invalid(f"{self._name} can't be started: {error.strerror}") from None
        if code != 0:
            ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Invalid(f"{self._name} {ending}{_tail(errors)}")
        if len(output) >= _OUTPUT_LIMIT:
            raise Invalid(
                f"{self._name} printed more than {_OUTPUT_LIMIT} bytes: print only one host per line"
            )
        try:
            return parse_lines(
                output.decode("utf-8", "replace"),
                source=f"the output of {self._name},",
                default_slots=self._default_slots,
                slots_min=0,
            )
        except Invalid as error:
            raise Invalid(f"{error}{_tail(errors)}") from None


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
        self._kept += data[: _OUTPUT_LIMIT - len(self._kept)]
        return bool(data)

    def bytes(self) -> bytes:
        """Return the output so far. Bounded, since a program left in the background may continue to write."""
        for _ in range(_OUTPUT_LIMIT >> 16):
            if not self._read():
                break
        return bytes(self._kept)


async def execute(
    command: list[str], timeout_s: float, *, env: Mapping[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    """Return exit code (or the negative signal), stdout and stderr. ``env``: default is that of this process.

    Raises:
        TimeoutError: the command has not ended in time.
        OSError: it cannot be started.
    """
    with _Output() as output, _Output() as errors:
        process = await asyncio.create_subprocess_exec(
            # The shell starts immediately and then executes the script, whose file access may hang (unreachable network
            # disk).
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
                # Reaps it. A process that hangs in the kernel is left to the event loop.
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(process.wait(), 1.0)
        return code, output.bytes(), errors.bytes()


def _tail(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()[-3:]
    return f"; its stderr: {' | '.join(line.strip() for line in lines)[-400:]}" if lines else ""
