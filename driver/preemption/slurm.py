"""Slurm: the end of the allocation, and the signal that `sbatch --signal` asks for.

slurm.schedmd.com/sbatch.html: SLURM_JOB_END_TIME, seconds since 1970, since Slurm 22.05; --signal=B:USR1@120 sends
SIGUSR1 to the batch script, which must `exec elasticrun` for it to arrive.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from elastic.driver.preemption.source import Ends

JOB, END = VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_END_TIME")
LEAD_S = 120.0  # before the end
SIGNALLED_S = 60.0  # from the signal to the end where nothing else says when that is


class Slurm:
    name = "Slurm"
    pause_s = 1.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._job = environ.get(JOB, "")
        end = environ.get(END, "")
        self._end_at = float(end) if end.isdecimal() else None
        self._signalled: Ends | None = None

    def here(self) -> bool:
        return bool(self._job)

    def look(self) -> Ends | None:
        now = time.time()
        if self._end_at is not None and now >= self._end_at - LEAD_S:
            return Ends(f"Slurm ends job {self._job}", self._end_at)
        return self._signalled

    def signalled(self) -> None:
        """SIGUSR1 has come. Safe from another thread: one assignment."""
        at = time.time() + SIGNALLED_S if self._end_at is None else self._end_at
        self._signalled = Ends(f"Slurm says with a signal that it ends job {self._job}", at)

    def released(self) -> None:
        pass

    def hint(self) -> str:
        return ""
