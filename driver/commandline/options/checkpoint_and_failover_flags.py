"""Flags for checkpoints, driver failover and preemption: names and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.checkpoints.options import DEFAULT_EVERY, DEFAULT_KEEP, DEFAULT_RESTARTS
from elastic.driver.commandline.options.argument_parser import (
    EVERYWHERE,
    flag,
    seconds,
    switch,
    whole,
)


@dataclass
class FailoverFlags:
    """Flags for driver failover."""

    resume: bool = switch(
        "--resume", "Continue the job recorded in --journal or --etcd, or start a new one."
    )
    standby: bool = switch(
        "--standby", "Run as standby driver: take over the job in --etcd when its driver fails."
    )
    fresh: bool = switch(
        "--fresh",
        "Start a new job; discard the earlier job in --journal or --etcd.",
        use=EVERYWHERE,
    )
    driver_timeout: float | None = flag(
        "--driver-timeout",
        "S",
        "How long workers keep training without a driver (default: 600 with --resume"
        " or --standby, else 30).",
        seconds,
    )
    driver_port: int | None = flag(
        "--driver-port",
        "PORT",
        "Port on which the driver accepts agents (default: any free port).",
        whole(1),
    )


@dataclass
class CheckpointFlags:
    """Flags for checkpoints."""

    checkpoint_dir: str | None = flag(
        "--checkpoint-dir",
        "DIR",
        "Shared folder or fsspec URL of checkpoints; training resumes from the newest (default:"
        " ELASTIC_CHECKPOINT_DIR).",
        variable="ELASTIC_CHECKPOINT_DIR",
        keys=("checkpoint.dir",),
        use=EVERYWHERE,
    )
    checkpoint_every: str | None = flag(
        "--checkpoint-every",
        "EVERY",
        f"Checkpoint interval: 60s, 10m, 1h, 500commits or manual (default: {DEFAULT_EVERY}).",
        variable="ELASTIC_CHECKPOINT_EVERY",
        keys=("checkpoint.every",),
        use=EVERYWHERE,
    )
    checkpoint_keep: int | None = flag(
        "--checkpoint-keep",
        "N",
        f"Number of newest checkpoints to keep (default: {DEFAULT_KEEP}).",
        whole(1),
        variable="ELASTIC_CHECKPOINT_KEEP",
        keys=("checkpoint.keep",),
        use=EVERYWHERE,
    )
    begin_from: str | None = flag(
        "--from",
        "DIR@COMMIT",
        "Start from this commit; write new checkpoints to --checkpoint-dir.",
        use=EVERYWHERE,
    )
    restarts: int | None = flag(
        "--restarts",
        "N",
        f"Maximum number of restarts of all workers without a new checkpoint (default: {DEFAULT_RESTARTS}).",
        whole(0),
        keys=("checkpoint.restarts",),
        use=EVERYWHERE,
    )


@dataclass
class PreemptionFlags:
    """Flags for preemption notices."""

    preemption: str | None = flag(
        "--preemption",
        "SOURCE",
        "Source of preemption notices: aws, gcp, azure, slurm, a command, off or auto (default:"
        " ELASTIC_PREEMPTION, or auto).",
        variable="ELASTIC_PREEMPTION",
        keys=("preemption.source",),
        use=EVERYWHERE,
    )
    preload: str | None = flag(
        "--preload",
        "MODULES",
        "Modules to preload in spare processes: NAMES, auto (imports of the script) or off; add ,2 for two processes"
        " (default: ELASTIC_PRELOAD, or auto if the job is elastic).",
        variable="ELASTIC_PRELOAD",
        keys=("preload.modules",),
        use=EVERYWHERE,
    )
