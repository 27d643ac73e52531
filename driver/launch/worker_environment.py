"""Environment of a new worker. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.driver.network.credentials import TlsFiles
from elastic.protocol.messages import Address, Place, Worker
from elastic.rendezvous import nccl_settings, rank_variables

# Variables with secrets of drivers and agents, which workers must not receive: a worker could use them to act as a
# driver or agent.
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
    wait_timeout_s: float,
    threads: int,
    tls: TlsFiles | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of a worker.

    Args:
        inherited: the driver's own environment.
        worker: the worker.
        place: provisional place of the worker. The final place is sent after the worker has connected.
        driver: address of the driver, or of the host's agent, to which the worker connects.
        secret: the job's secret, hexadecimal.
        bind: address on which the worker may listen for its peers.
        tls: TLS files, or None without TLS.
        threads: number of threads for the worker, its share of the cores.
        extra: the job's additional variables, including its timeouts. Like ``inherited``, they override the defaults
            but not the worker's identity.
    """
    env = {
        **defaults(threads),
        **without_secrets(inherited),
        **(extra or {}),
        **job_environment(worker, place, elastic, wait_timeout_s),
        **host_environment(driver, secret, bind, tls),
    }
    connect_s = float(env.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or nccl_settings.CONNECT_TIMEOUT_S)
    return env | nccl_settings.needed(connect_s)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a worker may inherit, that is, all except secrets."""
    return {name: value for name, value in environ.items() if name not in _KEPT_BACK}


def defaults(threads: int) -> dict[str, str]:
    """Return default values for environment variables that users may override.

    Args:
        threads: the worker's share of the cores.
    """
    return {
        **nccl_settings.DEFAULTS,
        "OMP_NUM_THREADS": str(threads),
        # Suppress Gloo's messages about dead peers, for which the driver logs a single line.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "PYTHONUNBUFFERED": "1",
    }


def job_environment(
    worker: Worker, place: Place, elastic: bool, wait_timeout_s: float
) -> dict[str, str]:
    """Return the variables that depend on the worker and the job but not on the host.

    Scripts and other libraries use the ``HOROVOD_`` variables to detect how they were started. The other variables are
    those of torchrun, in whose terms each host is a group, and all workers have the same role.

    Args:
        worker: the worker.
        place: provisional place of the worker.
        elastic: whether the job is elastic.
        wait_timeout_s: seconds for which the worker waits for a message from the driver.
    """
    return {
        "ELASTIC_WORKER": str(worker),
        "ELASTIC_WAIT_TIMEOUT": f"{wait_timeout_s:g}",
        "HOROVOD_ELASTIC": "1" if elastic else "0",
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_HOSTNAME": worker.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "LOCAL_RANK": str(place.local_rank),
        "ROLE_NAME": "default",
        **rank_variables.of(place),
        "TORCHELASTIC_RESTART_COUNT": str(worker.incarnation - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def host_environment(
    driver: Address, secret: str, bind: str, tls: TlsFiles | None = None
) -> dict[str, str]:
    """Return the variables that are the same for every worker of a host.

    Args:
        driver: address of the driver, or of the host's agent, to which the workers connect.
        secret: the job's secret, hexadecimal. It is passed in the environment, because every user can read the
            arguments of a process, but only the owner can read its environment.
        bind: address on which a worker may listen for its peers.
        tls: TLS files, or None without TLS.
    """
    # Omit Horovod's rendezvous address: other libraries would expect an HTTP server there, but none exists.
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
    """Return the number of threads for each worker, an equal share of the cores.

    Without this limit, torch would use one thread per core in each worker.
    """
    return max(1, cores // max(1, workers))
