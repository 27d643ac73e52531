"""The environment of a worker that is about to be started. Pure: what it is built from arrives as arguments."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.driver.network.credentials import TlsFiles
from elastic.protocol.messages import Address, Place, Worker
from elastic.rendezvous import nccl_settings

# By these a driver or an agent is told what would let a worker, or whoever reads its environment, pose as one.
_KEPT_BACK = {
    "ELASTIC_JOB_SECRET",
    "ELASTIC_SECRET_FILE",
    "ELASTIC_ETCD_PASSWORD",
    "ELASTIC_ETCD_PASSWORD_FILE",
}


def worker_environment(
    inherited: Mapping[str, str],
    *,
    worker: Worker,
    place: Place,
    driver: Address,
    secret: str,
    bind: str,
    elastic: bool,
    gloo_timeout_s: float,
    collective_timeout_s: float,
    wait_timeout_s: float,
    threads: int,
    tls: TlsFiles | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Everything a worker is told before it connects.

    ``inherited`` is the driver's own environment, ``extra`` the job's additions; both give way to the worker's
    identity, and go before the defaults. A group connects within ``gloo_timeout_s``.
    """
    job = job_environment(worker, place, elastic, collective_timeout_s, wait_timeout_s)
    return {
        **defaults(threads),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{gloo_timeout_s:g}",
        **without_secrets(inherited),
        **(extra or {}),
        **nccl_settings.needed(gloo_timeout_s),
        **job,
        **host_environment(driver, secret, bind, tls),
    }


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker may inherit."""
    return {name: value for name, value in environ.items() if name not in _KEPT_BACK}


def defaults(threads: int) -> dict[str, str]:
    """What holds unless somebody says otherwise. ``threads`` is this worker's share of its host's cores."""
    return {
        **nccl_settings.DEFAULTS,
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # Gloo's complaints about dead peers: the driver tells of them in a line
        "PYTHONUNBUFFERED": "1",
    }


def job_environment(
    worker: Worker, place: Place, elastic: bool, collective_timeout_s: float, wait_timeout_s: float
) -> dict[str, str]:
    """What the driver knows of a worker, on whatever host. ``place`` is provisional.

    A collective ends within ``collective_timeout_s``, and ``wait_timeout_s`` is for how long to wait for a word of the
    driver. Under Horovod's names stands what scripts and other libraries look for, to learn that they were started and
    how.
    """
    return {
        "ELASTIC_WORKER": str(worker),
        "ELASTIC_COLLECTIVE_TIMEOUT": f"{collective_timeout_s:g}",
        "ELASTIC_WAIT_TIMEOUT": f"{wait_timeout_s:g}",
        "HOROVOD_ELASTIC": "1" if elastic else "0",
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
        "HOROVOD_HOSTNAME": worker.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **_as_torchrun(worker, place),
    }


def _as_torchrun(worker: Worker, place: Place) -> dict[str, str]:
    """What torchrun tells a worker of its place. A group is a host, and there is one role."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.cross_rank),
        "GROUP_WORLD_SIZE": str(place.cross_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.size),
        "TORCHELASTIC_RESTART_COUNT": str(worker.incarnation - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def host_environment(
    driver: Address, secret: str, bind: str, tls: TlsFiles | None = None
) -> dict[str, str]:
    """What holds for every worker of one host.

    ``driver`` is whom they call: the driver itself, or the agent of their host. ``secret`` is hexadecimal: the
    environment of a process is readable by its user only, its arguments by everybody. ``bind`` is the address on which
    a worker may listen for its peers. At the rendezvous address other libraries would find somebody who speaks no HTTP.
    """
    return {
        "ELASTIC_DRIVER": str(driver),
        "ELASTIC_SECRET": secret,
        "ELASTIC_BIND": bind,
        "ELASTIC_TLS_CERT": "" if tls is None else tls.cert,
        "ELASTIC_TLS_KEY": "" if tls is None else tls.key,
        "ELASTIC_TLS_CA": "" if tls is None else tls.ca,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": driver.host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(driver.port),
    }


def threads_per_worker(cores: int, workers: int) -> int:
    """An equal share of the cores: torch's own default is all of them in every worker, many times too much."""
    return max(1, cores // max(1, workers))
