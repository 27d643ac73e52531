"""The flags for other hosts, for checkpoints, for drivers that follow each other, and for security. Names and help."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.checkpoints.options import DEFAULT_EVERY, DEFAULT_KEEP, DEFAULT_RESTARTS
from elastic.driver.commandline.arguments import Names, flag, seconds, switch, whole


@dataclass
class SshFlags:
    """How other hosts are reached, and what their workers are given."""

    ssh_port: int | None = flag(
        "-p --ssh-port", "PORT", "Reach other hosts by ssh on this port.", whole(1)
    )
    ssh_identity_file: str | None = flag(
        "-i --ssh-identity-file", "FILE", "Log in to other hosts with this key."
    )
    ssh_config: str | None = flag(
        "--ssh-config", "FILE", "Use this configuration of ssh (default: the user's)."
    )
    remote_python: str | None = flag(
        "--remote-python",
        "PATH",
        "The python with hvd-elastic on other hosts (default: where it is here, else python3).",
    )
    exported: list[str] | None = flag(
        "--export",
        "NAMES",
        "Give workers on all hosts these variables of this environment, besides HOROVOD_*, NCCL_* and the like.",
        action=Names,
    )


@dataclass
class EtcdFlags:
    """Where driver, agents and operators find each other."""

    job_name: str | None = flag("--job", "NAME", "The name under which driver and agents meet.")
    etcd: str | None = flag(
        "--etcd",
        "HOST:PORT,...",
        "The members of an etcd; without a list of hosts, they are those whose agents are there.",
    )
    etcd_user: str | None = flag(
        "--etcd-user", "NAME", "Log in to etcd; the password stands in ELASTIC_ETCD_PASSWORD."
    )
    etcd_ca: str | None = flag(
        "--etcd-ca", "FILE", "Speak TLS with etcd, whose certificate this one has signed."
    )
    etcd_cert: str | None = flag("--etcd-cert", "FILE", "Our certificate for etcd.")
    etcd_key: str | None = flag("--etcd-key", "FILE", "Its key.")


@dataclass
class KubernetesFlags:
    """Hosts that are pods."""

    kubernetes: bool = switch(
        "--kubernetes",
        "Hosts are pods, on each of which an agent runs, as the Kubernetes API tells them: those of the release --job,"
        " in this pod's namespace.",
    )
    kubernetes_selector: str | None = flag(
        "--kubernetes-selector",
        "LABELS",
        "With --kubernetes: the pods with these labels (default: app.kubernetes.io/instance=JOB"
        " and app.kubernetes.io/component=worker).",
    )
    kubernetes_namespace: str | None = flag(
        "--kubernetes-namespace", "NAME", "With --kubernetes: the pods of this namespace."
    )
    kubernetes_service: str | None = flag(
        "--kubernetes-service",
        "NAME",
        "Hosts are the addresses behind this headless service, on each of which an agent runs. With --kubernetes: only"
        " where this pod has no right to list pods.",
    )


@dataclass
class FailoverFlags:
    """Drivers that follow each other."""

    resume: bool = switch(
        "--resume",
        "Go on with the job of --journal or --etcd if there is one, else begin it. Commits are in the workers' memory:"
        " when all die at once, only what --checkpoint-dir, or the script, has saved is left.",
    )
    standby: bool = switch(
        "--standby",
        "Wait until no other driver leads the job in --etcd, then go on with it. Start two.",
    )
    fresh: bool = switch(
        "--fresh",
        "Begin a new job; what is left of an earlier one in --journal or under --job is ended.",
    )
    driver_timeout: float | None = flag(
        "--driver-timeout",
        "S",
        "Workers train on for so long without a driver (default: 600 with --resume or --standby, else 30).",
        seconds,
    )
    driver_port: int | None = flag(
        "--driver-port", "PORT", "Listen for agents on this port (default: any free one).", whole(1)
    )


@dataclass
class CheckpointFlags:
    """What outlives all workers."""

    checkpoint_dir: str | None = flag(
        "--checkpoint-dir",
        "DIR",
        "Write commits here in the background, and go on from the newest one when all workers are gone: a folder that"
        " all hosts share, or a URL of fsspec such as s3://bucket/folder (default: ELASTIC_CHECKPOINT_DIR).",
        variable="ELASTIC_CHECKPOINT_DIR",
        keys=("checkpoint.dir",),
    )
    checkpoint_every: str | None = flag(
        "--checkpoint-every",
        "EVERY",
        f"How often: 60s, 10m, 1h, 500commits, or manual, when the script asks (default: {DEFAULT_EVERY}). The last"
        " commit of a training becomes durable in any case.",
        variable="ELASTIC_CHECKPOINT_EVERY",
        keys=("checkpoint.every",),
    )
    checkpoint_keep: int | None = flag(
        "--checkpoint-keep",
        "N",
        f"Keep the newest N, remove older ones (default: {DEFAULT_KEEP}).",
        whole(1),
        variable="ELASTIC_CHECKPOINT_KEEP",
        keys=("checkpoint.keep",),
    )
    begin_from: str | None = flag(
        "--from",
        "DIR@COMMIT",
        "Begin from this commit of that folder; new ones go to --checkpoint-dir."
        " `elasticrun checkpoints DIR` lists them.",
    )
    restarts: int | None = flag(
        "--restarts",
        "N",
        f"Start all workers again at most N times with no new checkpoint between (default: {DEFAULT_RESTARTS}).",
        whole(0),
        keys=("checkpoint.restarts",),
    )


@dataclass
class PreemptionFlags:
    """Machines that go away, and what takes their place."""

    preemption: str | None = flag(
        "--preemption",
        "SOURCE",
        "Who announces the end of a machine: aws, gcp, azure, slurm, a command of your own, off, or auto, whichever of"
        " the first four is there (default: ELASTIC_PREEMPTION, or auto). A command is run again and again: exit code 0"
        " says that the machine goes, with the seconds until then on its output if they are known; 1 that it stays.",
        variable="ELASTIC_PREEMPTION",
        keys=("preemption.source",),
    )
    preload: str | None = flag(
        "--preload",
        "MODULES",
        "Keep an idle process with these modules imported on each host for the next worker; auto: the script's leading"
        " imports; auto,2: two processes; off: none (default: ELASTIC_PRELOAD, or auto if the job is elastic).",
        variable="ELASTIC_PRELOAD",
        keys=("preload.modules",),
    )


@dataclass
class SecurityFlags:
    """Who is let in, and what is encrypted."""

    secret_file: str | None = flag(
        "--secret-file",
        "FILE",
        "The job's secret, as `elasticrun secret FILE` makes one (default: ELASTIC_SECRET_FILE,"
        " ELASTIC_JOB_SECRET, or a new one where nobody else needs it).",
    )
    tls_cert: str | None = flag(
        "--tls-cert", "FILE", "Encrypt control connections; our certificate."
    )
    tls_key: str | None = flag("--tls-key", "FILE", "Its key.")
    tls_ca: str | None = flag(
        "--tls-ca", "FILE", "The authority that has signed the certificates of all hosts."
    )
