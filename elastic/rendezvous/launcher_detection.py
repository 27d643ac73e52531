"""Detection of this process's launcher, rank and rendezvous method from environment variables.

Pure: no I/O, no clock.

If elasticrun has set its variables, no others are read. Otherwise, the first set that is complete is used, from most to
least explicit: variables of Horovod, torch (torchrun, or set manually), Open MPI, MPICH and Intel MPI, Slurm. See
docs/launchers.md.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.errors import Invalid
from elastic.protocol.messages import Place

PORT_OFFSET = 1009  # added to MASTER_PORT, which the script's own init_process_group may use
# Ports to choose from if only a job ID is known. They are below the system's ephemeral ports.
FIRST_PORT, PORTS = (21_000, 8_000)
ASKS_FOR_PORT = "ELASTIC_MASTER_PORT"


@dataclass(frozen=True)
class ByTorchelasticStore:
    """Rendezvous through the TCPStore of torchrun's agent.

    Rank 0 publishes its address and a secret under keys that begin with ``prefix``.
    """

    host: str
    port: int
    prefix: str


@dataclass(frozen=True)
class ByAddress:
    """Rendezvous at an address that is set on all ranks: rank 0 listens on ``port`` of ``host``.

    ``secret`` is the same on all ranks.
    """

    host: str
    port: int
    secret: bytes


@dataclass(frozen=True)
class ByFile:
    """Rendezvous of ranks on one host through a file in which rank 0 publishes its address and a secret.

    Only the user who started the job can read the file.
    """

    name: str


@dataclass(frozen=True)
class ByStore:
    """Rendezvous through a shared torch.distributed store, in which rank 0 publishes its address and a secret.

    ``host`` is the host of rank 0, or empty if all ranks are on one host.
    """

    store: Any
    host: str


@dataclass(frozen=True)
class LauncherEnv:
    """Information that the launcher of this process has passed to it.

    Args:
        way: method by which ranks find rank 0, or None for a world of size 1.
        local_rank: rank within the host, or None if the launcher has not set it.
    """

    by: str
    rank: int
    size: int
    local_rank: int | None
    way: ByTorchelasticStore | ByAddress | ByFile | ByStore | None


def started(env: Mapping[str, str], *, parent: int = 0) -> LauncherEnv | None:
    """Return the launcher of this process, or None if elasticrun or no launcher started it.

    Args:
        env: environment variables.
        parent: process ID of the parent.

    Raises:
        Invalid: a rank is set, but the address of rank 0 is missing. The message names the variable to set.
    """
    if "ELASTIC_DRIVER" in env:
        return None
    for look in (_horovod, _torch, _open_mpi, _mpich, _slurm):
        found = look(env, parent)
        if found is not None:
            return found
    if _has(env, "RANK", "WORLD_SIZE") and _number(env, "WORLD_SIZE") > 1:
        raise Invalid(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is missing: set MASTER_ADDR and"
            " MASTER_PORT to the host of rank 0 and a port, or unset RANK"
        )
    if _has(env, "PMIX_RANK"):
        raise Invalid(
            "PMIX_RANK is set, but the number of ranks is unknown: also set HOROVOD_RANK, HOROVOD_SIZE,"
            " MASTER_ADDR and MASTER_PORT, or unset PMIX_RANK"
        )
    return None


def place(rank: int, hosts: Sequence[str], local_ranks_given: Sequence[int | None]) -> Place:
    """Return the place of a rank in the world.

    If local ranks are missing or contradictory, the ranks of each host are numbered in ascending order.

    Args:
        rank: rank to locate.
        hosts: host of each rank, in rank order.
        local_ranks_given: local rank that the launcher has set for each rank, or None.
    """
    local_ranks: dict[int, int] = {}
    for host in dict.fromkeys(hosts):
        there = [each for each, its in enumerate(hosts) if its == host]
        given = [local_ranks_given[each] for each in there]
        usable = None not in given and len(set(given)) == len(given)
        for index, each in enumerate(there):
            value = local_ranks_given[each]
            local_ranks[each] = value if usable and value is not None else index
    alike = [each for each in range(len(hosts)) if local_ranks[each] == local_ranks[rank]]
    return Place(
        rank=rank,
        size=len(hosts),
        local_rank=local_ranks[rank],
        local_size=hosts.count(hosts[rank]),
        cross_rank=alike.index(rank),
        cross_size=len(alike),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as gpu01 for ``gpu[01-03,07],login1``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise Invalid(
            f"SLURM_STEP_NODELIST is {nodes!r}, which contains no host: start the script with srun"
        )
    before, number, after = match.groups()
    return f"{before}{number or ''}{after or ''}"


# ---- launchers ---------------------------------------------------------------------------------------------------


def _horovod(env: Mapping[str, str], parent: int) -> LauncherEnv | None:
    if not _has(env, "HOROVOD_RANK", "HOROVOD_SIZE"):
        return None
    rank, size = _rank_of(env, "HOROVOD_RANK", "HOROVOD_SIZE")
    if size > 1 and not _has(env, "MASTER_ADDR", "MASTER_PORT"):
        raise Invalid(
            "HOROVOD_RANK and HOROVOD_SIZE are set, but MASTER_ADDR or MASTER_PORT is missing: set MASTER_ADDR"
            " and MASTER_PORT to the host of rank 0 and a port, or start the script with elasticrun"
        )
    by = "HOROVOD_RANK and HOROVOD_SIZE"
    return _made(by, rank, size, _local(env, "HOROVOD_LOCAL_RANK"), _by_hand(env, size))


def _torch(env: Mapping[str, str], parent: int) -> LauncherEnv | None:
    if not _has(env, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        return None
    rank, size = _rank_of(env, "RANK", "WORLD_SIZE")
    local_rank = _local(env, "LOCAL_RANK")
    if not _has(env, "TORCHELASTIC_RUN_ID"):
        return _made("RANK and WORLD_SIZE", rank, size, local_rank, _by_hand(env, size))
    run, restart = env["TORCHELASTIC_RUN_ID"], env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return _made("torchrun", rank, size, local_rank, _by_hand(env, size))
    prefix = f"hvd-elastic/{run}/{restart}/{size}"
    way = ByTorchelasticStore(env["MASTER_ADDR"], _number(env, "MASTER_PORT"), prefix)
    return _made("torchrun", rank, size, local_rank, way)


def _open_mpi(env: Mapping[str, str], parent: int) -> LauncherEnv | None:
    if not _has(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    rank, size = _rank_of(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    job = _first(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    here = _local(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = job or f"parent-{parent}"
    way = _of_launcher(env, size, "mpirun", job, one_host=here in (None, size))
    return _made("mpirun", rank, size, _local(env, "OMPI_COMM_WORLD_LOCAL_RANK"), way)


def _mpich(env: Mapping[str, str], parent: int) -> LauncherEnv | None:
    if not _has(env, "PMI_RANK", "PMI_SIZE"):
        return None
    rank, size = _rank_of(env, "PMI_RANK", "PMI_SIZE")
    job = _first(env, "PMI_JOBID", "PMI_KVSNAME") or _slurm_step(env) or f"parent-{parent}"
    here = _local(env, "MPI_LOCALNRANKS")
    way = _of_launcher(env, size, "mpirun", job, one_host=here in (None, size))
    return _made("mpirun", rank, size, _local(env, "MPI_LOCALRANKID"), way)


def _slurm(env: Mapping[str, str], parent: int) -> LauncherEnv | None:
    """Return the settings that srun passes to a job step, or None outside a job step.

    A batch script also has SLURM_PROCID and SLURM_NTASKS, but runs only once, so they are not sufficient.
    """
    job = _slurm_step(env)
    if job is None or not _has(env, "SLURM_PROCID"):
        return None
    count = "SLURM_STEP_NUM_TASKS" if _has(env, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if not _has(env, count):
        return None
    rank, size = _rank_of(env, "SLURM_PROCID", count)
    hosts = _first(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    nodes = _first(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    host = first_host(nodes) if nodes else None
    way = _of_launcher(env, size, "srun", job, one_host=hosts == "1", host=host)
    return _made("srun", rank, size, _local(env, "SLURM_LOCALID"), way)


def _slurm_step(env: Mapping[str, str]) -> str | None:
    job, step = env.get("SLURM_JOB_ID"), _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return f"{job}.{step}" if job and step else None


# ---- ways to connect ---------------------------------------------------------------------------------------------


def _by_hand(env: Mapping[str, str], size: int) -> ByAddress | ByFile | None:
    if size == 1:
        return None  # a world of one rank needs no rendezvous
    host, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT")
    if _loopback(host) and not _has(env, ASKS_FOR_PORT):
        return ByFile(_file_name("master", f"{host} {port} {size}"))
    return ByAddress(host, _port(env), _secret(env, f"{host} {port}"))


def _of_launcher(
    env: Mapping[str, str], size: int, by: str, job: str, *, one_host: bool, host: str | None = None
) -> ByAddress | ByFile | None:
    if size == 1:
        return None
    host = env.get("MASTER_ADDR") or host
    if one_host and not _has(env, ASKS_FOR_PORT):
        return ByFile(_file_name(by, job))
    if host is None:
        raise Invalid(
            f"{by} started ranks on several hosts, but the host of rank 0 is unknown: set MASTER_ADDR to this"
            " host on all ranks, or start the script with elasticrun"
        )
    return ByAddress(host, _port(env, job), _secret(env, f"{by} {job}"))


def _port(env: Mapping[str, str], job: str | None = None) -> int:
    """Return the port for rank 0.

    The port is ELASTIC_MASTER_PORT, else MASTER_PORT plus an offset, else a port derived from the job ID.
    """
    if _has(env, ASKS_FOR_PORT):
        return _port_in(env, ASKS_FOR_PORT)
    if _has(env, "MASTER_PORT"):
        master = _port_in(env, "MASTER_PORT")
        return master + PORT_OFFSET if master + PORT_OFFSET < 1 << 16 else master - PORT_OFFSET
    return FIRST_PORT + zlib.crc32((job or "").encode()) % PORTS


def _secret(env: Mapping[str, str], job: str) -> bytes:
    """Return ELASTIC_SECRET, or else a hash that distinguishes jobs but provides no authentication."""
    if not _has(env, "ELASTIC_SECRET"):
        return hashlib.sha256(job.encode()).digest()
    try:
        return bytes.fromhex(env["ELASTIC_SECRET"])
    except ValueError:
        raise Invalid(
            "ELASTIC_SECRET is not an even number of hexadecimal digits: copy the secret again from rank 0"
        ) from None


def _file_name(by: str, job: str) -> str:
    return f"{by}-{hashlib.sha256(job.encode()).hexdigest()[:24]}"


def _loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or re.fullmatch(r"127(\.\d+){3}", host) is not None


def _made(
    by: str,
    rank: int,
    size: int,
    local_rank: int | None,
    way: ByTorchelasticStore | ByAddress | ByFile | None,
) -> LauncherEnv:
    return LauncherEnv(by, rank, size, local_rank, way if size > 1 else None)


# ---- single variables --------------------------------------------------------------------------------------------


def _has(env: Mapping[str, str], *names: str) -> bool:
    return all(env.get(name) for name in names)


def _first(env: Mapping[str, str], *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise Invalid(f"{name} is {env[name]!r}: set it to a whole number")
    return int(env[name])


def _port_in(env: Mapping[str, str], name: str) -> int:
    port = _number(env, name)
    if not 0 < port < 1 << 16:
        raise Invalid(f"{name} is {port}, which is not a port: set it to a number from 1 to 65535")
    return port


def _rank_of(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(env, rank_name), _number(env, size_name)
    if rank >= size:
        raise Invalid(
            f"{rank_name} is {rank} and {size_name} is {size}: set {rank_name} to a value from 0 to {size_name}"
            " - 1"
        )
    return rank, size


def _local(env: Mapping[str, str], name: str) -> int | None:
    return _number(env, name) if env.get(name) else None
