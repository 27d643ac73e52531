"""A command of the user's own, for whatever else may announce the end of a machine.

It is run by ``sh -c``, again and again. Exit code 0: the machine goes, and what it has printed is the number of seconds
until then, if it is known, and a text. Exit code 1: it stays. Anything else is trouble. ELASTIC_HOST is the name of the
host that is asked about.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping

from elastic.driver.preemption.source import Ends, Trouble

ANSWER_S = 10.0


class Command:
    pause_s = 2.0

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self.name = f"--preemption {command!r}"
        self._command = command
        self._known: Ends | None = None

    def here(self) -> bool:
        return True

    def look(self) -> Ends | None:
        try:
            ran = subprocess.run(
                ["sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                env=self._environ,
                capture_output=True,
                timeout=ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Trouble(f"no answer within {ANSWER_S:g} s") from error
        except OSError as error:
            raise Trouble(str(error)) from error
        if ran.returncode == 1:
            self._known = None
            return None
        if ran.returncode != 0:
            wrote = ran.stderr.decode(errors="replace").strip()[-200:]
            raise Trouble(f"exit code {ran.returncode}, expected 0 or 1{wrote and f': {wrote}'}")
        self._known = self._read(ran.stdout.decode(errors="replace"))
        return self._known

    def released(self) -> None:
        pass

    def hint(self) -> str:
        return ""

    def _read(self, printed: str) -> Ends:
        lines = printed.strip().splitlines()
        first, _, rest = (lines[0] if lines else "").partition(" ")
        try:
            within_s: float | None = max(0.0, float(first))
        except ValueError:
            within_s, rest = None, lines[0] if lines else ""
        text = rest.strip()[:200] or f"{self._command!r} says so"
        known = self._known
        if within_s is None:
            return Ends(text, None)
        at = time.time() + within_s
        if known is not None and known.at is not None and known.at <= at + 1.0:
            at = known.at  # the same time, counted again
        return Ends(text, at)
