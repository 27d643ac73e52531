"""Additional settings of a job with agents.

They apply if workers run on other machines, if hosts register in etcd, or if the job supports driver failover.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field, replace

from elastic.driver.job.provider import Provider
from elastic.driver.launch.ssh import SshOptions
from elastic.driver.network.credentials import EtcdAccess, TlsFiles

# seconds for which workers keep training without a driver if another driver may take over
AWAY_S = 600.0
# seconds for which workers keep training without a driver if only this driver can reconnect
BOUND_AWAY_S = 30.0

# Environment variables to forward from the driver to all hosts, because they configure training rather than a machine.
FORWARDED = re.compile(
    r"(HOROVOD|ELASTIC|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|CUBLAS|CUDA_LAUNCH|HF|TRANSFORMERS)_\w+"
    r"|PYTHONPATH|PYTHONHASHSEED|PYTHONUNBUFFERED|PYTHONWARNINGS|TZ|LANG|LC_ALL"
)


@dataclass(frozen=True)
class PodSource:
    """Selection of the pods that are hosts.

    Args:
        slots: number of slots of each pod. None means the pod's number of GPUs, at least 1.
        notices: taints and conditions that announce the end of a node, in addition to the built-in ones.
    """

    selector: str
    namespace: str | None  # namespace of the pods; None means the namespace of this pod
    slots: int | None
    # address of this pod on which the driver listens; empty means the address that other hosts can reach
    address: str
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MultiHostPlan:
    """Settings for agents on other hosts and for driver failover.

    Args:
        outlived: whether agents keep running after this driver has exited.
    """

    name: str  # name of the job
    secret: bytes = field(repr=False)
    # whether the user specified the secret, which other processes may therefore know
    given_secret: bool
    etcd: EtcdAccess | None
    tls: TlsFiles | None
    ssh: SshOptions
    resume: bool
    standby: bool
    fresh: bool  # whether to start a new job even if an earlier job could be resumed
    interfaces: list[str]
    port: int
    away_s: float
    forwarded: dict[str, str] = field(repr=False)
    by_etcd: bool  # whether the hosts are those with an agent registered in etcd
    service: str | None  # headless service whose addresses are the hosts, or None
    pods: PodSource | None  # selection of the pods that are hosts, or None if hosts are not pods
    needed: bool  # whether the known hosts need agents
    # engine that supplies hosts and agents instead of host lists and ssh, or None
    provider: Provider | None = None

    @property
    def outlived(self) -> bool:
        return self.resume or self.standby

    @property
    def left_by_sigterm(self) -> bool:
        """Return whether SIGTERM ends only this driver and not the job.

        In Kubernetes, this is the case with driver failover, because the driver's pod is replaced when its node is
        drained.
        """
        return self.pods is not None and self.outlived

    @property
    def agents_come(self) -> bool:
        """Return whether agents are started externally rather than by this driver over ssh."""
        return self.by_etcd or self.service is not None or self.pods is not None

    def server_tls(self) -> ssl.SSLContext | None:
        """Return the server's TLS context, or None without TLS.

        Raises:
            Invalid: a certificate or the key cannot be loaded.
        """
        if self.tls is None:
            return None
        from elastic.protocol import tls

        return tls.context(self.tls.cert, self.tls.key, self.tls.ca, server=True)


def provided(plan: MultiHostPlan, provider: Provider) -> MultiHostPlan:
    """Return the plan for a job whose hosts an engine such as Ray supplies."""
    return replace(
        plan,
        provider=provider,
        needed=True,
        secret=provider.secret,
        given_secret=True,
        resume=provider.outlived,
        fresh=provider.fresh,
        away_s=AWAY_S if provider.outlived else plan.away_s,
    )
