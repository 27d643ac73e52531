"""Settings that a worker reads from environment variables. Only this module of the worker reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TypeVar

from elastic.errors import Invalid
from elastic.protocol import switches
from elastic.protocol.islands import IslandRule, parse_islands
from elastic.protocol.life_lock import LIFE_LOCK
from elastic.protocol.messages import Address, Worker
from elastic.protocol.switches import TENSORS, switch
from elastic.rendezvous import nccl_settings
from elastic.rendezvous.launcher_detection import LauncherEnv, started
from elastic.rendezvous.nccl_settings import CONNECT_TIMEOUT_S

WAIT_TIMEOUT_S = 1260.0  # twice the default of --elastic-timeout, plus a minute
START_TIMEOUT_S = 600.0  # long, because rank 0 may prepare data before the other ranks can proceed
# Same as torch's default. Long, because without a driver stuck ranks are not detected, and a checkpoint may take long.
COLLECTIVE_TIMEOUT_S = 1800.0
# Shorter for GPUs: once launched, a collective completes in seconds, and nothing else detects a hanging GPU.
LAUNCHED_TIMEOUT_S = 180.0
# value of HOROVOD_TIMELINE that records nothing until start_timeline() is called with a path
DYNAMIC = "DYNAMIC"

_TLS = ("ELASTIC_TLS_CERT", "ELASTIC_TLS_KEY", "ELASTIC_TLS_CA")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_BFC_MB = 64 << 10  # default maximum size of TensorFlow's own allocator, in MB


@dataclass(frozen=True)
class Environment:
    """Settings of one worker.

    Outside ``elasticrun``, ``driver`` is None and ``started`` describes the launcher. If both are None, the process is
    a world of size 1. Fields with names that end in ``_s`` are in seconds.
    """

    driver: Address | None
    worker: Worker
    secret: bytes
    # address on which this worker listens; empty means the local address of the route to rank 0
    bind_host: str
    elastic: bool
    timeout_s: float  # timeout for forming a group
    collective_timeout_s: float  # timeout for a collective
    wait_timeout_s: float  # maximum time without a message from the driver
    # whether to report a digest of every commit, so that replicas can be compared
    digest_commits: bool
    # whether to report a digest of each tensor as well, so that two runs can be compared
    digest_tensors: bool = False
    # maximum fraction of the time that may be spent on copying at commits; 0 means a copy at every commit
    commit_budget: float = 0.0
    islands: tuple[IslandRule, ...] = ()  # rules of --islands; see elastic.protocol.islands
    workers_min: int = 1  # minimum number of workers of the job
    checks: bool = True  # whether to check the script's first steps; see elastic.script_checks
    strict: bool = False  # whether a finding of these checks ends the job
    # whether to admit workers whose results are not bitwise identical; see elastic.exact.arithmetic_probe
    allow_inexact: bool = False
    # folder in which states with wrong gradients are saved; empty means that they are not
    keep_faulty: str = ""
    cycle_s: float = 0.001  # seconds between rounds of negotiation and fusion; 0 means no delay
    # maximum number of names with a cached negotiation; 0 disables the cache
    cache_capacity: int = 1024
    # maximum size of a fused collective in bytes; None means the default
    fusion_bytes: int | None = None
    group_fusion: bool = True  # whether tensors of a group may be fused with tensors outside it
    # seconds until a warning about a collective that waits for other ranks; 0 means never
    stall_warning_s: float = 60.0
    # seconds until a collective that waits for other ranks fails; 0 means never
    stall_shutdown_s: float = 0.0
    # CPU core of the background thread, by local rank; empty means any core
    cores: tuple[int, ...] = ()
    dynamic_process_sets: bool = False
    timeline: str | None = None  # path of the timeline, or DYNAMIC
    timeline_mark_cycles: bool = False
    # paths of certificate, key and CA for the control connection; None means no TLS
    tls: tuple[str, str, str] | None = None
    # launcher that started this worker, if not elasticrun
    started: LauncherEnv | None = None
    start_timeout_s: float = START_TIMEOUT_S  # timeout for all ranks to call init()
    native: bool = True  # whether ranks on one host reduce in shared memory if possible
    # location of the lock through which the agent detects this process's death immediately
    life_lock: str = ""

    def core(self, local_rank: int) -> int | None:
        """Return the CPU core for this rank's background thread, or None for any core."""
        return self.cores[local_rank] if 0 <= local_rank < len(self.cores) else None


def read(
    environ: Mapping[str, str] | None = None, launched: LauncherEnv | None = None
) -> Environment:
    """Read the settings of this worker.

    Args:
        environ: environment variables (default: those of this process).
        launched: description of the launcher, if known.

    Raises:
        Invalid: a variable of the launcher or of Horovod has an invalid value.
    """
    env = os.environ if environ is None else environ
    alone = Worker("localhost", 0, 1)
    timeout_s = _seconds(env, "HOROVOD_GLOO_TIMEOUT_SECONDS", CONNECT_TIMEOUT_S)
    patience_s = timeout_s if env.get("HOROVOD_GLOO_TIMEOUT_SECONDS") else COLLECTIVE_TIMEOUT_S
    driver: Address | None = None
    worker, secret = alone, b""
    if "ELASTIC_DRIVER" in env:
        try:
            host, _, port = env["ELASTIC_DRIVER"].rpartition(":")
            driver = Address(host.strip("[]"), int(port))
            worker = Worker.parse(env["ELASTIC_WORKER"])
            secret = bytes.fromhex(env["ELASTIC_SECRET"])
        except (KeyError, ValueError) as error:
            raise Invalid(
                "ELASTIC_DRIVER is set, but ELASTIC_WORKER or ELASTIC_SECRET is missing or corrupted: start the"
                " script with elasticrun, or unset ELASTIC_DRIVER"
            ) from error
    tls = tuple(env.get(name) or "" for name in _TLS)
    if any(tls) and not all(tls):
        missing = _TLS[tls.index("")]
        raise Invalid(
            f"{missing} is not set, but other variables of {', '.join(_TLS)} are set: set all three variables"
        )
    launched = launched or started(env, parent=os.getppid())
    stalls = not switch(env, "HOROVOD_STALL_CHECK_DISABLE")
    warning_s = _number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds", 60.0)
    shutdown_s = _number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "seconds", 0.0)
    return Environment(
        driver=driver,
        worker=worker,
        secret=secret,
        bind_host=env.get("ELASTIC_BIND") or ("127.0.0.1" if launched is None else ""),
        elastic=env.get("HOROVOD_ELASTIC", "0") == "1",
        timeout_s=timeout_s,
        # with a driver the timeout can be longer, because the driver detects stuck ranks itself
        collective_timeout_s=_seconds(env, "ELASTIC_COLLECTIVE_TIMEOUT", patience_s),
        wait_timeout_s=_seconds(env, "ELASTIC_WAIT_TIMEOUT", WAIT_TIMEOUT_S),
        digest_commits=digests(env),
        commit_budget=_number(env, "ELASTIC_COMMIT_BUDGET", "percent", 0.0) / 100,
        islands=parse_islands(env.get("ELASTIC_ISLANDS", "")),
        workers_min=_whole(env, "ELASTIC_MIN_WORKERS", 1) or 1,
        checks=switch(env, "ELASTIC_CHECKS", default=True),
        strict=switch(env, "ELASTIC_STRICT"),
        allow_inexact=switch(env, "ELASTIC_ALLOW_INEXACT"),
        keep_faulty=env.get("ELASTIC_KEEP_FAULTY", ""),
        digest_tensors=digests(env) and env["ELASTIC_DIGESTS"] == TENSORS,
        cycle_s=_number(env, "HOROVOD_CYCLE_TIME", "milliseconds", 1.0) / 1000,
        cache_capacity=_whole(env, "HOROVOD_CACHE_CAPACITY", Environment.cache_capacity),
        fusion_bytes=_whole(env, "HOROVOD_FUSION_THRESHOLD", None),
        group_fusion=not switch(env, "HOROVOD_DISABLE_GROUP_FUSION"),
        stall_warning_s=warning_s if stalls else 0.0,
        stall_shutdown_s=shutdown_s if stalls else 0.0,
        cores=_cores(env),
        dynamic_process_sets=switch(env, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline=env.get("HOROVOD_TIMELINE") or None,
        timeline_mark_cycles=switch(env, "HOROVOD_TIMELINE_MARK_CYCLES"),
        tls=(tls[0], tls[1], tls[2]) if any(tls) else None,
        started=launched,
        start_timeout_s=_seconds(env, "HOROVOD_START_TIMEOUT", START_TIMEOUT_S),
        native=native(env),
        life_lock=env.get(LIFE_LOCK, ""),
    )


def native(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ranks on one host may share memory."""
    return switch(os.environ if environ is None else environ, "ELASTIC_NATIVE", default=True)


def legacy_keras(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``tf.keras`` is legacy Keras, by TensorFlow's own rules.

    The result is always False with other backends.
    """
    env = os.environ if environ is None else environ
    wanted = env.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
    return wanted and env.get("KERAS_BACKEND", "") in ("", "tensorflow")


def digests(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether workers report digests of commits. Raises Invalid if ELASTIC_DIGESTS has an invalid value."""
    return switches.digests(os.environ if environ is None else environ)


def record_nothing(environ: MutableMapping[str, str] | None = None) -> None:
    """Disable torch's flight recorder unless the user has set TORCH_FR_BUFFER_SIZE.

    The recorder keeps the last 2000 collectives of the process with their Python stacks, and never frees some data of
    every group: 8 MB with three workers. These data fragment the heap, so that the memory between them can't be
    returned to the system. Torch reads the variable when it creates its first group.
    """
    env = os.environ if environ is None else environ
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # deprecated name of the variable
        env.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def keep_tensors(
    environ: MutableMapping[str, str] | None = None, host_bytes: int | None = None
) -> None:
    """Make TensorFlow use its own CPU allocator, which keeps memory between steps. A user's choice takes precedence.

    Without it, malloc would return the memory of gradients that wait for reduction to the system after each step, and
    in the next step the kernel would zero every page again. The allocator may use all of ``host_bytes``, the host's
    memory in bytes (default: queried from the system). TensorFlow reads the variable when it creates its first tensor.
    """
    env = os.environ if environ is None else environ
    if "TF_CPU_ALLOCATOR_USE_BFC" in env or allocator_chosen(env):
        return
    env["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    if host_bytes is None:
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    env.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(max(host_bytes >> 20, _BFC_MB)))


def prepare(env: Environment, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables of torch and NCCL that elasticrun would set. Call this in init(), before torch starts threads.

    Variables that already have the correct value are not written, because setenv is unsafe while other threads read the
    environment.
    """
    environ = os.environ if environ is None else environ
    for name, value in nccl_settings.needed(env.timeout_s).items():
        if environ.get(name) != value:
            environ[name] = value
    for name, value in nccl_settings.DEFAULTS.items():
        environ.setdefault(name, value)


def launched_timeout_s(
    collective_timeout_s: float, environ: Mapping[str, str] | None = None
) -> float:
    """Return the timeout in seconds of a GPU collective, counted from its launch on this rank.

    The result is ``collective_timeout_s`` if the user has set a timeout, or if there is a driver, which detects ranks
    that have not launched the collective. Otherwise it is at most `LAUNCHED_TIMEOUT_S`.
    """
    env = os.environ if environ is None else environ
    own = ("ELASTIC_DRIVER", "ELASTIC_COLLECTIVE_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")
    if any(env.get(name) for name in own):
        return collective_timeout_s
    return min(collective_timeout_s, LAUNCHED_TIMEOUT_S)


def gpus_are_shared(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether NCCL_MULTI_RANK_GPU_ENABLE permits several ranks on one GPU, which requires NCCL 2.30 or later."""
    env = os.environ if environ is None else environ
    return switch(env, "NCCL_MULTI_RANK_GPU_ENABLE")


def allocator_chosen(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user has chosen or configured this process's memory allocator."""
    env = os.environ if environ is None else environ
    return (
        any(env.get(name) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"))
        or "glibc.malloc." in env.get("GLIBC_TUNABLES", "")
        or any(name in env.get("LD_PRELOAD", "") for name in _ALLOCATORS)
    )


def failpoints(environ: Mapping[str, str] | None = None) -> str:
    """Return the rules of `elastic.failpoints` as text, or an empty string if none are set."""
    env = os.environ if environ is None else environ
    return env.get("ELASTIC_FAILPOINTS", "").strip()


def worker(environ: Mapping[str, str] | None = None) -> Worker:
    """Return the identity of this worker from its environment variables, without reading other settings."""
    env = os.environ if environ is None else environ
    try:
        return Worker.parse(env["ELASTIC_WORKER"])
    except (KeyError, ValueError):
        return Worker("localhost", 0, 1)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    value = _number(env, name, "seconds", default)
    if value == 0:
        raise Invalid(f"{name} is {env[name]!r}: set it to a positive number of seconds")
    return value


def _number(env: Mapping[str, str], name: str, of: str, default: float) -> float:
    """Parse a number in an environment variable. Return ``default`` if the variable is unset or empty."""
    try:
        value = float(env.get(name) or default)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise Invalid(f"{name} is {env[name]!r}: set it to a number of {of}")
    return value


Default = TypeVar("Default", int, None)


def _whole(env: Mapping[str, str], name: str, default: Default) -> int | Default:
    text = env.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise Invalid(f"{name} is {text!r}: set it to a whole number, 0 or more")
    return int(text)


def _cores(env: Mapping[str, str]) -> tuple[int, ...]:
    text = env.get("HOROVOD_THREAD_AFFINITY", "")
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() for word in words):
        raise Invalid(
            f"HOROVOD_THREAD_AFFINITY is {text!r}: set it to one core number per worker of a host, as in 0,1,2,3"
        )
    return tuple(map(int, words))
