"""Slurm as a source of preemption notices: the end of the allocation, and the signal sent by `sbatch --signal`.

See slurm.schedmd.com/sbatch.html. SLURM_JOB_END_TIME is in seconds since 1970. Slurm 22.05 does not set this variable.

--signal=B:USR1@120 sends SIGUSR1 to the batch script, which must `exec elasticrun` so that elasticrun receives the
signal. Only `squeue` shows whether the time limit has been extended.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Mapping

from elastic.driver.preemption.source import PreemptionNotice

JOB, END = VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_END_TIME")
LEAD_S = 120.0  # seconds before the end of the allocation at which the notice is given
SIGNALLED_S = 60.0  # assumed number of seconds from the signal to the end, if the end is unknown
# Minimum and maximum interval, in seconds, between two queries to the controller, which serves the whole cluster. The
# interval doubles while the job has no end.
ASK_S, ASK_AT_MOST_S = 30.0, 900.0
ANSWER_S = 10.0


class Slurm:
    name = "Slurm"
    pause_s = 1.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        # With this setting, Slurm prints times in seconds since 1970.
        self._environ = {**environ, "SLURM_TIME_FORMAT": "%s"}
        self._job = environ.get(JOB, "")
        self._end_at = _seconds(environ.get(END, ""))
        self._ask_at = 0.0
        self._pause_s = ASK_S
        self._signalled: PreemptionNotice | None = None

    def here(self) -> bool:
        return bool(self._job)

    def look(self) -> PreemptionNotice | None:
        """Return the current notice, or None.

        Slurm's controller is queried while the end of the allocation is unknown, and again when the end is near,
        because the time limit may have been extended.
        """
        now = time.time()
        if now >= self._ask_at and self._near(now):
            self._end_at = self._query() or self._end_at
            self._pause_s = ASK_S if self._end_at else min(2 * self._pause_s, ASK_AT_MOST_S)
            self._ask_at = now + self._pause_s
            if self._end_at is not None and not self._near(now):
                self._signalled = None  # the time limit was extended
        if self._end_at is not None and self._near(now):
            return PreemptionNotice(f"Slurm will end job {self._job}", self._end_at)
        return self._signalled

    def signalled(self) -> None:
        """Record that SIGUSR1 arrived. Thread-safe, because it makes only one assignment, which is atomic."""
        at = time.time() + SIGNALLED_S if self._end_at is None else self._end_at
        self._signalled = PreemptionNotice(
            f"Slurm announced the end of job {self._job} with a signal", at
        )

    def released(self) -> None:
        pass

    def hint(self) -> str:
        return ""

    def _near(self, now: float) -> bool:
        return self._end_at is None or now >= self._end_at - LEAD_S

    def _query(self) -> float | None:
        command = ["squeue", "--noheader", "--jobs", self._job, "--format", "%A %e"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_S,
                check=False,
            )
            # The ID of a job array is also the ID of its first task. For this ID, squeue lists all tasks.
            lines = done.stdout.splitlines() if done.returncode == 0 else []
            ends = [
                end for line in lines for job, _, end in [line.partition(" ")] if job == self._job
            ]
            return _seconds(ends[0].strip()) if ends else None
        return None


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
