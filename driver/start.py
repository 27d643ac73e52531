"""Puts a checked job together and runs it in this process. Decides nothing."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from elastic.driver import loop
from elastic.driver.console import Console, write_to
from elastic.driver.job import Job, open_discovery
from elastic.driver.journal import Journal
from elastic.driver.launch.local import LocalLauncher
from elastic.driver.membership import Membership
from elastic.driver.output import Output
from elastic.driver.server import Server

# Horovod's names; ours have four levels.
_LEVELS = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARNING": "warning",
    "ERROR": "error",
    "FATAL": "error",
}


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``results`` are the values of launched functions by rank, still pickled."""

    code: int
    reason: str
    results: list[bytes]


async def start(job: Job) -> Outcome:
    """Runs the job to its end; no worker is left when this returns.

    Raises Invalid for what can be known before anything is started, OSError if it can't listen.
    """
    membership = Membership(job.settings)
    output = Output(
        place_of=membership.place_of,
        stdout=write_to(sys.stdout),
        stderr=write_to(sys.stderr),
        timestamps=job.prefix_timestamps,
        folder=Path(job.output_dir) if job.output_dir else None,
    )
    console = Console(output.say, level=_LEVELS[job.log_level], colour=sys.stderr.isatty())
    try:
        for level, line in job.notes:
            console(level, line)
        discovery = await open_discovery(job, console)
        journal = Journal(
            Path(job.journal) if job.journal else None,
            job.settings,
            failed=lambda text: console("warning", text),
        )
        driver = loop.Driver(
            loop.Job(
                settings=job.settings,
                command=job.command,
                environ=job.environ,
                interface=job.bind,
                bind=job.bind,
                gloo_timeout_s=float(job.settings.env.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")),
            ),
            membership=membership,
            server=Server(secret=secrets.token_bytes(32), log=console),
            launcher=LocalLauncher(sink=output, log=console),
            discovery=discovery,
            journal=journal,
            log=console,
        )
        code = await driver.run()
        return Outcome(code, driver.outcome, driver.ordered_results())
    finally:
        output.close()
