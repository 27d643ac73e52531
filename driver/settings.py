"""Settings of a job, which are validated when they are created. Pure.

`cli` creates them from flags, a configuration file and the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from elastic.errors import Invalid

UNBOUNDED = 2**31 - 1  # value of workers_max if the size is limited only by the slots

# The flag that sets each field. Fields that are not listed have no flag.
FLAGS = {
    "np": "-np",
    "workers_min": "--min-np",
    "workers_max": "--max-np",
    "standbys": "--standbys",
    "start_timeout_s": "--start-timeout",
    "elastic_timeout_s": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_min_s": "minimum of --blacklist-cooldown-range",
    "cooldown_max_s": "maximum of --blacklist-cooldown-range",
    "slot_attempts": "--slot-attempts",
    "host_attempts": "--host-attempts",
    "lease_s": "--lease",
    "idle_s": "--idle-timeout",
    "busy_warning_s": "--busy-warning",
    "busy_s": "--busy-timeout",
    "gpu_hang_s": "--gpu-hang-timeout",
    "gpu_limit_s": "ELASTIC_COLLECTIVE_TIMEOUT",
    "restarts": "--restarts",
    "health_check": "--health-check",
    "health_check_s": "--health-check-timeout",
    "bandwidth_factor": "--bandwidth-factor",
    "quarantine": "--quarantine",
    "straggler_factor": "--straggler-factor",
    "replace_stragglers": "--replace-stragglers",
    "timeline": "--timeline-filename",
}

AUTO = "auto"  # name of the built-in health check
# default speed below which a worker is a straggler, relative to the median speed of the others
STRAGGLER_FACTOR = 0.5
QUARANTINES = ("slot", "host", "off")


class StartCheckpoint(msgspec.Struct, frozen=True):
    """Checkpoint from which a job begins.

    Args:
        name: name of the checkpoint's folder inside ``place``.
        place: folder or URL of all checkpoints of the job.
        step: step counter of the state, or None if the state has none.
    """

    name: str
    place: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a job.

    Values of fields whose names end in ``_s`` are in seconds.

    Raises:
        Invalid: a value is not allowed. The message names the option to change.
    """

    np: int
    workers_min: int
    workers_max: int
    elastic: bool
    standbys: int = 0  # number of standbys: workers beyond workers_max that wait for a place
    start_timeout_s: float = 120.0  # timeout from a worker's start to its call of init()
    # timeout for enough workers to be available, and for survivors to gather
    elastic_timeout_s: float = 600.0
    reset_limit: int | None = None  # maximum number of failed worlds; planned changes do not count
    # seconds before a failed slot is used again, doubled after each failure
    cooldown_min_s: float = 1.0
    cooldown_max_s: float = 60.0  # longest cooldown of a failed slot, in seconds
    # Number of consecutive workers without progress after which their slot is given up.
    slot_attempts: int = 5
    # Number of given-up slots after which their host is given up. None means never.
    host_attempts: int | None = None
    settle_s: float = 0.3  # seconds that a ready newcomer waits for other workers that are starting
    prepare_s: float = 5.0  # timeout for the answers of all members to a planned change
    leave_s: float = 30.0  # timeout from the request to leave until the worker's exit
    # seconds after the loss of its connection at which a worker is fenced if its exit was not observed
    disconnect_s: float = 2.0
    reconnect_s: float = 15.0  # timeout for all workers to reconnect to a restarted driver
    # Number of consecutive failed worlds, without a lost worker or a new commit, after which the job ends.
    stranded_failures: int = 3
    # Liveness timeout: a worker that has been unable to run for this many seconds counts as frozen.
    lease_s: float = 2.0
    # Seconds after which a host that does not respond counts as lost, if other workers wait for it. 0 disables this.
    silence_s: float = 0.0
    # Seconds after which an idle worker counts as stuck while other workers wait for it. 0 disables this.
    idle_s: float = 30.0
    # Seconds after which a busy worker is logged if other workers wait for it. 0 disables this.
    busy_warning_s: float = 60.0
    # Seconds after which a busy worker counts as stuck while others wait for it. 0 disables this.
    busy_s: float = 600.0
    # Seconds without progress of launched work after which a GPU counts as hung. 0 disables this.
    gpu_hang_s: float = 10.0
    # Seconds without progress after which a collective that all ranks have launched counts as hung if the cause is
    # unclear.
    gpu_limit_s: float = 180.0
    # seconds that a stuck worker has for writing its stacks before it is killed
    dump_s: float = 0.5
    # seconds after a kill at which it counts as failed if the process has not exited
    kill_s: float = 1.0
    # maximum number of new workers that start at the same time while a world is training
    starting_max: int | None = None
    # Maximum number of restarts from the same checkpoint. None if the job makes no checkpoints.
    restarts: int | None = None
    # Whether the job ends if its script fails again in the same way, and whether the log names the workers that are
    # missing because of script failures.
    judge_scripts: bool = False
    # whether the job fails if workers are missing at its end because their script failed
    strict: bool = False
    durable: bool = False  # whether commits are made durable in a checkpoint folder
    # Command that checks a slot before its worker is admitted. AUTO selects the built-in check, None no check.
    health_check: str | None = None
    health_check_s: float = 60.0  # time limit of the health check, in seconds
    # Fraction of the other hosts' median bandwidth below which the built-in check fails. 0 disables this.
    bandwidth_factor: float = 0.2
    # What to quarantine after a worker has computed wrong results: "slot", "host", or "off" for nothing.
    quarantine: str = "slot"
    # Fraction of the other workers' median speed below which a worker is a straggler. 0 disables this.
    straggler_factor: float = STRAGGLER_FACTOR
    replace_stragglers: bool = False  # whether stragglers are replaced by standbys
    # absolute path of the file to which the timeline of all ranks is written
    timeline: str | None = None
    # additional environment variables of every worker
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.np < 1:
            raise Invalid(f"-np is {self.np}: pass at least 1 worker")
        if not 1 <= self.workers_min <= self.workers_max:
            raise Invalid(
                f"--min-np {self.workers_min} and --max-np {self.workers_max} allow no world size: pass 1 <= min <="
                " max"
            )
        if not self.workers_min <= self.np <= self.workers_max:
            raise Invalid(
                f"-np {self.np} is not between --min-np {self.workers_min} and --max-np {self.workers_max}: pass"
                " min <= np <= max"
            )
        if self.standbys and (not self.elastic or self.workers_max == UNBOUNDED):
            raise Invalid(
                f"--standbys {self.standbys} requires a maximum world size: pass --max-np"
            )
        for name in ("start_timeout_s", "elastic_timeout_s", "cooldown_min_s", "cooldown_max_s"):
            if getattr(self, name) <= 0:
                raise Invalid(f"{name} is {getattr(self, name)}: pass a positive number of seconds")
        if self.cooldown_min_s > self.cooldown_max_s:
            raise Invalid(
                f"the cooldown range from {self.cooldown_min_s} to {self.cooldown_max_s} s is empty: pass MIN <="
                " MAX"
            )
        for name in ("idle_s", "busy_warning_s", "busy_s", "gpu_hang_s"):
            if getattr(self, name) < 0:
                raise Invalid(
                    f"{self._shown(name)}: pass a number of seconds, or 0 to disable the timeout"
                )
        for name in ("lease_s", "gpu_limit_s", "kill_s", "health_check_s"):
            if getattr(self, name) <= 0:
                raise Invalid(f"{self._shown(name)}: pass a positive number of seconds")
        if self.health_check is not None and not self.health_check.strip():
            raise Invalid(
                f"{FLAGS['health_check']} is empty: pass a command or auto, or omit the flag"
            )
        if not 0 <= self.bandwidth_factor < 1:
            raise Invalid(
                f"{self._shown('bandwidth_factor')}: pass a fraction below 1 of the median bandwidth of the"
                " other hosts, or 0 to admit hosts of any bandwidth"
            )
        if self.quarantine not in QUARANTINES:
            raise Invalid(
                f"{FLAGS['quarantine']} is {self.quarantine!r}: pass one of {', '.join(QUARANTINES)}"
            )
        if not 0 <= self.straggler_factor < 1:
            raise Invalid(
                f"{self._shown('straggler_factor')}: pass a fraction below 1 of the median speed of the other"
                " workers, or 0 to disable straggler detection"
            )
        if self.replace_stragglers and not (self.standbys and self.straggler_factor):
            raise Invalid(
                f"{FLAGS['replace_stragglers']} replaces workers by standbys: pass --standbys, and a"
                f" {FLAGS['straggler_factor']} above 0"
            )
        if self.dump_s < 0:
            raise Invalid(f"{self._shown('dump_s')}: pass 0 or more seconds")
        least = {"standbys": 0, "reset_limit": 0, "restarts": 0}
        least |= {"starting_max": 1, "slot_attempts": 1, "host_attempts": 1}
        for name, count in least.items():
            if getattr(self, name) is not None and getattr(self, name) < count:
                raise Invalid(f"{self._shown(name)}: pass {count} or more")

    def _shown(self, name: str) -> str:
        return f"{FLAGS.get(name, name)} is {getattr(self, name):g}"
