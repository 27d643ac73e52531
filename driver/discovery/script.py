"""Discovery by a script that prints the available hosts: ``host`` or ``host:slots``, one per line. See `polling`."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable

from elastic.driver.discovery.interface import Log
from elastic.driver.discovery.polling import OUTPUT_LIMIT, PolledDiscovery, execute
from elastic.driver.network.host_lists import parse_lines
from elastic.errors import Invalid


def find_script(text: str, *, path: str | None = None) -> list[str]:
    """Return the command for ``--host-discovery-script``, with the absolute path of the script.

    Args:
        text: the value of the flag: a path, or a path with arguments.
        path: value of the environment variable PATH for the search.

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


class ScriptDiscovery(PolledDiscovery):
    """Discovery that runs ``command`` every ``interval_s`` seconds, for at most ``timeout_s`` seconds per run."""

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
            Invalid: the script failed, or printed an invalid list.
        """
        try:
            code, output, errors = await execute(self._command, self._timeout_s)
        except asyncio.TimeoutError:
            raise Invalid(
                f"{self.name} did not finish within {self._timeout_s:g} s: make it print a list that another"
                " process keeps up to date"
            ) from None
        except OSError as error:
            raise Invalid(
                f"{self.name} can't be started: {error.strerror}. Check its first line (#!) and its permissions"
            ) from None
        if code != 0:
            ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Invalid(f"{self.name} {ending}{_tail(errors)}; run it by hand to see its error")
        if len(output) >= OUTPUT_LIMIT:
            raise Invalid(
                f"{self.name} printed more than {OUTPUT_LIMIT} bytes: change the script to print one host per line and"
                " nothing else"
            )
        try:
            return parse_lines(
                output.decode("utf-8", "replace"),
                source=f"the output of {self.name},",
                default_slots=self._default_slots,
                slots_min=0,
            )
        except Invalid as error:
            raise Invalid(f"{error}{_tail(errors)}") from None


def _tail(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()[-3:]
    return f"; its stderr: {' | '.join(line.strip() for line in lines)[-400:]}" if lines else ""
