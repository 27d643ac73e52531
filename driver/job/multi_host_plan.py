"""The additional settings of a job on several hosts.

A job is such a one if it has a host that is not this machine, hosts that come by etcd, or a driver that may be followed
by another.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field, replace

from elastic.driver.job.provider import Provider
from elastic.driver.launch.ssh import SshOptions
from elastic.driver.network.credentials import EtcdAccess, TlsFiles

AWAY_S = 600.0  # workers train on for so long without a driver, where another may come
BOUND_AWAY_S = 30.0  # ... where none will, should only the connection have been lost

# What of the driver's environment goes to workers on all hosts: what is about training, not about the driver's machine.
FORWARDED = re.compile(
    r"(HOROVOD|ELASTIC|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|CUBLAS|CUDA_LAUNCH|HF|TRANSFORMERS)_\w+"
    r"|PYTHONPATH|PYTHONHASHSEED|PYTHONUNBUFFERED|PYTHONWARNINGS|TZ|LANG|LC_ALL"
)


@dataclass(frozen=True)
class PodSource:
    """``slots``: of each pod; None: as many as it has GPUs, or one."""

    selector: str
    namespace: str | None  # None: this pod's own
    slots: int | None
    address: str  # of this pod, where the driver listens; empty: where the rest of the world would reach it


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """``elsewhere``: some host is another machine. ``outlived``: agents go on without this driver."""

    name: str  # of the job
    secret: bytes = field(repr=False)
    given_secret: bool  # by the user, so that others have it too
    etcd: EtcdAccess | None
    tls: TlsFiles | None
    ssh: SshOptions
    resume: bool
    standby: bool
    fresh: bool  # begin a job, whatever there is to go on with
    interfaces: list[str]
    port: int
    away_s: float
    forwarded: dict[str, str] = field(repr=False)
    by_etcd: bool  # hosts are the agents that register there
    service: str | None  # a headless service whose addresses are the hosts
    pods: PodSource | None  # the hosts, as the Kubernetes API tells them
    needed: bool  # known already to be such a job
    provider: Provider | None = None  # of hosts and agents, in place of lists and ssh

    @property
    def outlived(self) -> bool:
        return self.resume or self.standby

    @property
    def left_by_sigterm(self) -> bool:
        """Kubernetes ends a driver's pod with its node, and starts another: that is not the end of the job."""
        return self.pods is not None and self.outlived

    @property
    def agents_come(self) -> bool:
        """By themselves: nobody is started over ssh."""
        return self.by_etcd or self.service is not None or self.pods is not None

    def server_tls(self) -> ssl.SSLContext | None:
        """Raises Invalid."""
        if self.tls is None:
            return None
        from elastic.protocol import tls

        return tls.context(self.tls.cert, self.tls.key, self.tls.ca, server=True)


def provided(plan: FleetPlan, provider: Provider) -> FleetPlan:
    """The same, with hosts from an engine."""
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
