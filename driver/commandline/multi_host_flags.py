"""The flags for other hosts, for checkpoints, for drivers that follow each other, and for security. Names and help."""

from __future__ import annotations

from elastic.checkpoints.options import DEFAULT_EVERY, DEFAULT_KEEP, DEFAULT_RESTARTS
from elastic.driver.commandline.arguments import Group, Names, seconds, whole


def add_several_hosts(add: Group) -> None:
    add("-p --ssh-port", "PORT", whole(1), "Reach other hosts by ssh on this port.")
    add("-i --ssh-identity-file", "FILE", str, "Log in to other hosts with this key.")
    add("--ssh-config", "FILE", str, "Use this configuration of ssh (default: the user's).")
    add(
        "--remote-python",
        "PATH",
        str,
        "The python with hvd-elastic on other hosts (default: where it is here, else python3).",
    )
    add(
        "--export",
        "NAMES",
        str,
        "Give workers on all hosts these variables of this environment, besides HOROVOD_*, NCCL_*"
        " and the like.",
        action=Names,
        dest="exported",
    )
    add_etcd(add)
    add(
        "--kubernetes",
        None,
        None,
        "Hosts are pods, on each of which an agent runs, as the Kubernetes API tells them: those of the release --job,"
        " in this pod's namespace.",
    )
    add(
        "--kubernetes-selector",
        "LABELS",
        str,
        "With --kubernetes: the pods with these labels (default: app.kubernetes.io/instance=JOB"
        " and app.kubernetes.io/component=worker).",
    )
    add(
        "--kubernetes-namespace",
        "NAME",
        str,
        "With --kubernetes: the pods of this namespace.",
    )
    add(
        "--kubernetes-service",
        "NAME",
        str,
        "Hosts are the addresses behind this headless service, on each of which an agent runs. With --kubernetes: only"
        " where this pod has no right to list pods.",
    )


def add_etcd(add: Group) -> None:
    add("--job", "NAME", str, "The name under which driver and agents meet.", dest="job_name")
    add(
        "--etcd",
        "HOST:PORT,...",
        str,
        "The members of an etcd; without a list of hosts, they are those whose agents are there.",
    )
    add(
        "--etcd-user",
        "NAME",
        str,
        "Log in to etcd; the password stands in ELASTIC_ETCD_PASSWORD.",
    )
    add("--etcd-ca", "FILE", str, "Speak TLS with etcd, whose certificate this one has signed.")
    add("--etcd-cert", "FILE", str, "Our certificate for etcd.")
    add("--etcd-key", "FILE", str, "Its key.")


def add_failover(add: Group) -> None:
    add(
        "--resume",
        None,
        None,
        "Go on with the job of --journal or --etcd if there is one, else begin it. Commits are in the workers' memory:"
        " when all die at once, only what --checkpoint-dir, or the script, has saved is left.",
    )
    add(
        "--standby",
        None,
        None,
        "Wait until no other driver leads the job in --etcd, then go on with it. Start two.",
    )
    add(
        "--fresh",
        None,
        None,
        "Begin a new job; what is left of an earlier one in --journal or under --job is ended.",
    )
    add(
        "--driver-timeout",
        "S",
        seconds,
        "Workers train on for so long without a driver (default: 600 with --resume or --standby,"
        " else 30).",
    )
    add(
        "--driver-port",
        "PORT",
        whole(1),
        "Listen for agents on this port (default: any free one).",
    )


def add_checkpoints(add: Group) -> None:
    add(
        "--checkpoint-dir",
        "DIR",
        str,
        "Write commits here in the background, and go on from the newest one when all workers are gone: a folder that"
        " all hosts share, or a URL of fsspec such as s3://bucket/folder (default: ELASTIC_CHECKPOINT_DIR).",
        variable="ELASTIC_CHECKPOINT_DIR",
        keys=("checkpoint.dir",),
    )
    add(
        "--checkpoint-every",
        "EVERY",
        str,
        "How often: 60s, 10m, 1h, 500commits, or manual, when the script asks (default:"
        f" {DEFAULT_EVERY})."
        " The last commit of a training becomes durable in any case.",
        variable="ELASTIC_CHECKPOINT_EVERY",
        keys=("checkpoint.every",),
    )
    add(
        "--checkpoint-keep",
        "N",
        whole(1),
        f"Keep the newest N, remove older ones (default: {DEFAULT_KEEP}).",
        variable="ELASTIC_CHECKPOINT_KEEP",
        keys=("checkpoint.keep",),
    )
    add(
        "--from",
        "DIR@COMMIT",
        str,
        "Begin from this commit of that folder; new ones go to --checkpoint-dir."
        " `elasticrun checkpoints DIR` lists them.",
        dest="begin_from",
    )
    add(
        "--restarts",
        "N",
        whole(0),
        f"Start all workers again at most N times with no new checkpoint between (default: {DEFAULT_RESTARTS}).",
        keys=("checkpoint.restarts",),
    )


def add_preemption(add: Group) -> None:
    add(
        "--preemption",
        "SOURCE",
        str,
        "Who announces the end of a machine: aws, gcp, azure, slurm, a command of your own, off, or auto, whichever of"
        " the first four is there (default: ELASTIC_PREEMPTION, or auto). A command is run again and again: exit code 0"
        " says that the machine goes, with the seconds until then on its output if they are known; 1 that it stays.",
        variable="ELASTIC_PREEMPTION",
        keys=("preemption.source",),
    )
    add(
        "--preload",
        "MODULES",
        str,
        "Keep on each host one process that has imported torch, and these modules, and start the next worker there from"
        " it, in place of a lost one; auto: those that the script imports first; auto,2: two such processes (default:"
        " ELASTIC_PRELOAD, or none).",
        variable="ELASTIC_PRELOAD",
        keys=("preload.modules",),
    )


def add_security(add: Group) -> None:
    add(
        "--secret-file",
        "FILE",
        str,
        "The job's secret, as `elasticrun secret FILE` makes one (default: ELASTIC_SECRET_FILE,"
        " ELASTIC_JOB_SECRET, or a new one where nobody else needs it).",
    )
    add("--tls-cert", "FILE", str, "Encrypt control connections; our certificate.")
    add("--tls-key", "FILE", str, "Its key.")
    add("--tls-ca", "FILE", str, "The authority that has signed the certificates of all hosts.")
