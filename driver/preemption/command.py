"""User-defined command as a source of preemption notices.

The command is run periodically by ``sh -c``. Its environment contains the name of the host in ELASTIC_HOST. If its exit
code is 0, the machine will be reclaimed, and the output consists of the number of seconds until then, if known, and a
description. Exit code 1 means that there is no notice. Other exit codes are errors.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping

from elastic.driver.preemption.source import PreemptionNotice, SourceError
from elastic.driver.processes import orphan_reaper_program

ANSWER_S = 10.0
# maximum number of seconds; larger printed values, including infinity, are reduced to it
MOST_S = 1e6


class Command:
    pause_s = 2.0

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self.name = f"--preemption {command!r}"
        self._command = command
        self._known: PreemptionNotice | None = None

    def here(self) -> bool:
        return True

    def look(self) -> PreemptionNotice | None:
        code, printed, wrote = self._run()
        if code == 1:
            self._known = None
            return None
        if code != 0:
            wrote = wrote.strip()[-200:]
            raise SourceError(
                f"the command ended with exit code {code} instead of 0 (preempted) or 1 (not"
                f" preempted){wrote and f': {wrote}'}. Correct the command"
            )
        self._known = self._read(printed)
        return self._known

    def released(self) -> None:
        pass

    def hint(self) -> str:
        return ""

    def _run(self) -> tuple[int, str, str]:
        """Run the user's command. Return its exit code, stdout and stderr.

        After ANSWER_S seconds, all processes of the command are killed.
        """
        try:
            process = subprocess.Popen(
                ["sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise SourceError(str(error)) from error
        with process:
            try:
                printed, wrote = process.communicate(timeout=ANSWER_S)
            except subprocess.TimeoutExpired as error:
                # Child processes of the command are killed as well.
                orphan_reaper_program.kill_group(process.pid)
                raise SourceError(
                    f"the command did not finish within {ANSWER_S:g} s: pass a faster command"
                ) from error
        return process.returncode, printed, wrote

    def _read(self, printed: str) -> PreemptionNotice:
        lines = printed.strip().splitlines()
        first, _, rest = (lines[0] if lines else "").partition(" ")
        try:
            within_s: float | None = min(max(0.0, float(first)), MOST_S)
        except ValueError:
            within_s, rest = None, lines[0] if lines else ""
        text = rest.strip()[:200] or f"reported by {self._command!r}"
        known = self._known
        if within_s is None:
            return PreemptionNotice(text, None)
        at = time.time() + within_s
        if known is not None and known.at is not None and known.at <= at + 1.0:
            # keep the time of the earlier notice, unless the new one is more than a second earlier
            at = known.at
        return PreemptionNotice(text, at)
