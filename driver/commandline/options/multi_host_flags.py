"""Flags for multiple hosts: ssh, etcd, Kubernetes, and security: names and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.driver.commandline.options.argument_parser import (
    ON_LAUNCH,
    NameList,
    flag,
    switch,
    whole,
)


@dataclass
class SshFlags:
    """Flags for ssh to other hosts, and for the environment of workers there."""

    ssh_port: int | None = flag(
        "-p --ssh-port", "PORT", "SSH port of the other hosts.", whole(1), use=ON_LAUNCH
    )
    ssh_identity_file: str | None = flag(
        "-i --ssh-identity-file", "FILE", "SSH private key for the other hosts.", use=ON_LAUNCH
    )
    ssh_config: str | None = flag(
        "--ssh-config", "FILE", "ssh configuration file (default: ~/.ssh/config)."
    )
    remote_python: str | None = flag(
        "--remote-python",
        "PATH",
        "Python interpreter on the other hosts (default: the same path as here, else python3).",
    )
    exported: list[str] | None = flag(
        "--export",
        "NAMES",
        "Further environment variables for all workers, besides HOROVOD_*, NCCL_* and similar.",
        action=NameList,
    )


@dataclass
class EtcdFlags:
    """Flags for etcd, through which the driver, agents and operators find each other."""

    job_name: str | None = flag("--job", "NAME", "Name of the job, shared by driver and agents.")
    etcd: str | None = flag(
        "--etcd", "HOST:PORT,...", "etcd endpoints of the job, as in etcd1:2379,etcd2:2379."
    )
    etcd_user: str | None = flag(
        "--etcd-user",
        "NAME",
        "User name for etcd; the password is read from ELASTIC_ETCD_PASSWORD.",
    )
    etcd_ca: str | None = flag("--etcd-ca", "FILE", "CA certificate for etcd; enables TLS.")
    etcd_cert: str | None = flag("--etcd-cert", "FILE", "Client certificate for etcd.")
    etcd_key: str | None = flag("--etcd-key", "FILE", "Private key of --etcd-cert.")


@dataclass
class KubernetesFlags:
    """Flags for hosts that are Kubernetes pods."""

    kubernetes: bool = switch(
        "--kubernetes", "Discover hosts as the pods of --job through the Kubernetes API."
    )
    kubernetes_selector: str | None = flag(
        "--kubernetes-selector",
        "LABELS",
        "With --kubernetes: label selector of pods (default: app.kubernetes.io/instance=JOB and"
        " app.kubernetes.io/component=worker).",
    )
    kubernetes_namespace: str | None = flag(
        "--kubernetes-namespace",
        "NAME",
        "With --kubernetes: namespace of the pods (default: the namespace of this pod).",
    )
    program_from_pods: bool = switch(
        "--program-from-pods",
        "With --kubernetes: run the program given after -- in the pods' agent command.",
    )
    node_notices: list[str] | None = flag(
        "--node-notices",
        "NAMES",
        "With --kubernetes: further node taints and conditions to treat as preemption notices.",
        action=NameList,
    )
    kubernetes_service: str | None = flag(
        "--kubernetes-service",
        "NAME",
        "Headless service for host discovery; with --kubernetes, a fallback for the API.",
    )


@dataclass
class SecurityFlags:
    """Flags for authentication and encryption."""

    secret_file: str | None = flag(
        "--secret-file",
        "FILE",
        "File with the job's secret, created by `elasticrun secret FILE` (default: ELASTIC_SECRET_FILE, or the"
        " secret in ELASTIC_JOB_SECRET).",
    )
    tls_cert: str | None = flag(
        "--tls-cert",
        "FILE",
        "TLS certificate of this process; enables TLS for control connections.",
    )
    tls_key: str | None = flag("--tls-key", "FILE", "Private key of --tls-cert.")
    tls_ca: str | None = flag(
        "--tls-ca", "FILE", "CA certificate that signed the certificates of all hosts."
    )
