"""Puts a checked job together and runs it in this process. Decides nothing."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.driver import loop
from elastic.driver.console import Console, write_to
from elastic.driver.job import Job, open_discovery
from elastic.driver.journal import Journal
from elastic.driver.launch.local import LocalLauncher
from elastic.driver.membership import Membership
from elastic.driver.output import Output
from elastic.driver.server import WORKERS, Server
from elastic.driver.tracing import Tracing

if TYPE_CHECKING:
    from elastic.driver.metrics import Metrics

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
    metrics: Metrics | None = None
    console = Console(
        output.say,
        level=_LEVELS[job.log_level],
        colour=sys.stderr.isatty(),
        timestamps=job.log_timestamps,
    )
    try:
        for level, line in job.notes:
            console(level, line)
        discovery = await open_discovery(job, console)
        journal = Journal(
            Path(job.journal) if job.journal else None,
            job.settings,
            failed=lambda text: console("warning", text),
        )
        tracing = Tracing(console)
        if job.settings.timeline is not None:
            tracing.open(job.settings.timeline)
            console("info", f"the timeline is written to {job.settings.timeline}")
        if job.metrics is not None:
            from elastic.driver.metrics import Metrics  # its library takes a tenth of a second

            metrics = Metrics(*job.metrics)
            host = f"[{job.metrics[0]}]" if ":" in job.metrics[0] else job.metrics[0]
            console("info", f"metrics are at http://{host}:{metrics.port}/metrics")
        driver = loop.Driver(
            loop.Job(
                settings=job.settings,
                command=job.command,
                environ=job.environ,
                interface=job.bind,
                bind=job.bind,
                gloo_timeout_s=float(job.settings.env.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")),
                collective_timeout_s=job.collective_timeout_s,
            ),
            membership=membership,
            server=Server(
                secret=secrets.token_bytes(32),
                log=console,
                callers=WORKERS,
                lease_s=job.settings.lease_s,
            ),
            launcher=LocalLauncher(sink=output, log=console, lease_s=job.settings.lease_s),
            discovery=discovery,
            journal=journal,
            log=console,
            noted=None if metrics is None else metrics.note,
            tracing=tracing,
        )
        code = await driver.run()
        return Outcome(code, driver.outcome, driver.ordered_results())
    finally:
        if metrics is not None:
            metrics.close()
        output.close()
