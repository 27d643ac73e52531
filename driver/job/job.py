"""Complete and validated definition of a job: its program, its hosts, and its reports. `cli` creates it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from elastic.driver.discovery.slurm import Allocation
from elastic.driver.job.multi_host_plan import MultiHostPlan
from elastic.driver.processes.console import Write
from elastic.driver.settings import Settings, StartCheckpoint
from elastic.protocol.report_values import Report


class Stoppable(Protocol):
    """Interface of a driver whose job can be stopped."""

    def stop(self, reason: str, code: int = 1) -> None:
        """End the job with exit code ``code``. On the second call, kill its workers immediately. Thread-safe."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Complete and validated definition of a job.

    At most one of ``hosts``, ``script`` and ``allocation`` is set. If none of them is set, ``fleet`` supplies the
    hosts.

    The variables in ``settings.env`` are added to every worker's environment. ``environ`` is the driver's environment.
    """

    command: list[str]  # program and its arguments
    settings: Settings
    hosts: dict[str, int] | None  # number of slots of each host, in order of preference
    script: list[str] | None  # absolute path of the discovery script, and its arguments
    allocation: Allocation | None = None  # Slurm allocation that supplies the hosts
    # settings for agents and driver failover; None if all workers run on this machine without failover
    fleet: MultiHostPlan | None = None
    own_slots: bool = False  # whether the user did not specify the number of slots of this machine
    slots_per_host: int = (
        1  # number of slots of a host that the discovery script lists without a number
    )
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    # functions that write output instead of the driver's stdout and stderr
    streams: tuple[Write, Write] | None = None
    # called with each report of a worker, in the event loop's thread
    reported: Callable[[Report], object] | None = None
    preemption: str = "off"  # source of preemption notices; see `preemption.watch`
    # modules that the preloaded process for the next worker imports; see `processes.prepared`
    preload: str = ""
    stdin_rank: int | None = None  # rank of the worker that inherits standard input
    # called with the driver once it has been created
    begun: Callable[[Stoppable], object] | None = None
    # called with the address and the key for operators
    steered: Callable[[str, bytes], object] | None = None
    bind: str = "127.0.0.1"  # address on which the driver and the workers listen
    output_dir: str | None = None  # existing, writable folder for output files
    prefix_timestamps: bool = False
    begins: StartCheckpoint | None = None
    journal: str | None = None  # writable path of the journal
    summary: bool = False  # whether to log a summary of how the time was spent when the job ends
    report: str | None = None  # writable path of the report page
    metrics: tuple[str, int] | None = None  # address and port on which to serve metrics
    dashboard: tuple[str, int] | None = None  # address and port on which to serve the live page
    # whether to send traces of recoveries, configured by the variables in ``environ``
    opentelemetry: bool = False
    tensorboard: str | None = None  # writable folder for TensorBoard events
    log_level: str = "INFO"  # one of `flags.LOG_LEVELS`
    log_timestamps: bool = True  # whether to prefix the driver's log lines with the time
    # log lines about the start of the job: level and text
    notes: list[tuple[str, str]] = field(default_factory=list)
    # called if the start fails; removes the files that the checks created, unless the job has used them
    refused: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """Return the name by which commands such as ``elasticrun status`` find the job."""
        return f"job-{os.getpid()}" if self.fleet is None else self.fleet.name
