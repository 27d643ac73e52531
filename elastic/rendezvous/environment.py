"""What a worker reads of its environment: the one place on the worker's side that does."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TypeVar

from elastic.errors import Invalid
from elastic.protocol.life_lock import LIFE_LOCK
from elastic.protocol.messages import Address, Worker
from elastic.rendezvous import nccl_settings
from elastic.rendezvous.launcher_env import Started, started

WAIT_TIMEOUT_S = 1260.0  # twice the default of --elastic-timeout, and a minute
CONNECT_TIMEOUT_S = 30.0
START_TIMEOUT_S = 600.0  # rank 0 may prepare the data first
# Without a driver nobody judges who is stuck, and a rank may take its time over a checkpoint. As long as torch's own.
COLLECTIVE_TIMEOUT_S = 1800.0
# On GPUs even that ends: all that is launched ends in seconds, and nobody else would say that a GPU hangs.
LAUNCHED_TIMEOUT_S = 180.0
DYNAMIC = "DYNAMIC"  # HOROVOD_TIMELINE: none yet, start_timeline() will say where

_TLS = ("ELASTIC_TLS_CERT", "ELASTIC_TLS_KEY", "ELASTIC_TLS_CA")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_BFC_MB = 64 << 10  # what TensorFlow's own allocator takes at most, where nobody says more
_ON_OR_OFF = {"0": False, "false": False, "1": True, "true": True}
TENSORS = "tensors"  # a value of ELASTIC_DIGESTS


@dataclass(frozen=True)
class Environment:
    """``driver`` is None outside ``elasticrun``: then ``started`` says what another launcher told, and if that is None
    too, the process is a world of one. ``_s`` are seconds.
    """

    driver: Address | None
    worker: Worker
    secret: bytes
    # The address on which this worker may listen; empty: the one that leads to rank 0.
    bind_host: str
    elastic: bool
    timeout_s: float  # to form a group
    collective_timeout_s: float  # for a collective to end
    wait_timeout_s: float  # for the driver's word, should it be frozen
    digest_commits: bool  # report a digest of every commit, so that replicas can be compared
    digest_tensors: bool = False  # ... and of each of its tensors, so that two runs can be
    workers_min: int = 1  # in any world of the job
    checks: bool = True  # of the script's first steps; see elastic.script_checks
    strict: bool = False  # what they find ends the job
    allow_inexact: bool = False  # let workers in that compute differently; see elastic.exact.probe
    cycle_s: float = 0.001  # between two rounds of negotiation and fusion; 0: at once
    cache_capacity: int = 1024  # names whose negotiation is remembered; 0: none
    fusion_bytes: int | None = None  # of what is fused into one collective; None: not given
    group_fusion: bool = True  # whether a group may be fused with other tensors
    stall_warning_s: float = 60.0  # ranks that have waited this long for others say so; 0: never
    stall_shutdown_s: float = 0.0  # ... and then the collective fails; 0: never
    cores: tuple[int, ...] = ()  # of the background thread, by local rank; empty: any
    dynamic_process_sets: bool = False
    timeline: str | None = None  # a path, or DYNAMIC
    timeline_mark_cycles: bool = False
    # Paths of certificate, key and authority, for the control connection; None: it is in the clear.
    tls: tuple[str, str, str] | None = None
    started: Started | None = None  # by whom, if not by elasticrun
    start_timeout_s: float = START_TIMEOUT_S  # without a driver: for every rank to call init()
    native: bool = True  # ranks of one host reduce in shared memory where they can
    life_lock: str = ""  # by which its agent sees at once that this process dies

    def core(self, local_rank: int) -> int | None:
        """The core on which this rank's background thread is to run; None: any."""
        return self.cores[local_rank] if 0 <= local_rank < len(self.cores) else None


def read(environ: Mapping[str, str] | None = None, launched: Started | None = None) -> Environment:
    """Raises Invalid where a variable is damaged: those that the launcher sets, and Horovod's. ``launched``: by whom,
    if that is known.
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
        raise Invalid(f"{missing} is not set, but others of {', '.join(_TLS)} are; set all three")
    launched = launched or started(env, parent=os.getppid())
    stalls = not _switch(env, "HOROVOD_STALL_CHECK_DISABLE")
    warning_s = _number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds", 60.0)
    shutdown_s = _number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "seconds", 0.0)
    return Environment(
        driver=driver,
        worker=worker,
        secret=secret,
        bind_host=env.get("ELASTIC_BIND") or ("127.0.0.1" if launched is None else ""),
        elastic=env.get("HOROVOD_ELASTIC", "0") == "1",
        timeout_s=timeout_s,
        # Where the driver judges who is stuck, this is the last resort, and longer.
        collective_timeout_s=_seconds(env, "ELASTIC_COLLECTIVE_TIMEOUT", patience_s),
        wait_timeout_s=_seconds(env, "ELASTIC_WAIT_TIMEOUT", WAIT_TIMEOUT_S),
        digest_commits=digests(env),
        workers_min=_whole(env, "ELASTIC_MIN_WORKERS", 1) or 1,
        checks=env.get("ELASTIC_CHECKS", "").lower() not in ("off", "0"),
        strict=_switch(env, "ELASTIC_STRICT"),
        allow_inexact=_switch(env, "ELASTIC_ALLOW_INEXACT"),
        digest_tensors=env.get("ELASTIC_DIGESTS") == TENSORS,
        cycle_s=_number(env, "HOROVOD_CYCLE_TIME", "milliseconds", 1.0) / 1000,
        cache_capacity=_whole(env, "HOROVOD_CACHE_CAPACITY", Environment.cache_capacity),
        fusion_bytes=_whole(env, "HOROVOD_FUSION_THRESHOLD", None),
        group_fusion=not _switch(env, "HOROVOD_DISABLE_GROUP_FUSION"),
        stall_warning_s=warning_s if stalls else 0.0,
        stall_shutdown_s=shutdown_s if stalls else 0.0,
        cores=_cores(env),
        dynamic_process_sets=_switch(env, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline=env.get("HOROVOD_TIMELINE") or None,
        timeline_mark_cycles=_switch(env, "HOROVOD_TIMELINE_MARK_CYCLES"),
        tls=(tls[0], tls[1], tls[2]) if any(tls) else None,
        started=launched,
        start_timeout_s=_seconds(env, "HOROVOD_START_TIMEOUT", START_TIMEOUT_S),
        native=native(env),
        life_lock=env.get(LIFE_LOCK, ""),
    )


def native(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ranks of one host may share memory."""
    return _switch(os.environ if environ is None else environ, "ELASTIC_NATIVE", default=True)


def legacy_keras(environ: Mapping[str, str] | None = None) -> bool:
    """Whether TensorFlow's ``tf.keras`` is to be legacy Keras, as TensorFlow reads it. Other backends have none."""
    env = os.environ if environ is None else environ
    wanted = env.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
    return wanted and env.get("KERAS_BACKEND", "") in ("", "tensorflow")


def digests(environ: Mapping[str, str] | None = None) -> bool:
    """Whether workers report what they commit, so that it can be compared."""
    env = os.environ if environ is None else environ
    return env.get("ELASTIC_DIGESTS", "0") in ("1", TENSORS)


def record_nothing(environ: MutableMapping[str, str] | None = None) -> None:
    """Turns off torch's flight recorder, unless somebody asked for it by TORCH_FR_BUFFER_SIZE.

    It keeps the last 2000 collectives of the process with their Python stacks, and something of every group for ever:
    8 MB with three workers, in pieces between which other memory can't be given back. Read by torch when it makes its
    first group.
    """
    env = os.environ if environ is None else environ
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # its older name
        env.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def keep_tensors(
    environ: MutableMapping[str, str] | None = None, host_bytes: int | None = None
) -> None:
    """Has TensorFlow keep the memory of its tensors on the CPU from one step to the next, in an allocator of its own,
    unless somebody has chosen another. Read by TensorFlow when it makes its first tensor.

    With malloc's, gradients that wait for their reduction go back to the system after each step, and come back page by
    page, filled with zeros. ``host_bytes``: the host's memory, all of which that allocator may take; by default asked.
    """
    env = os.environ if environ is None else environ
    if "TF_CPU_ALLOCATOR_USE_BFC" in env or allocator_chosen(env):
        return
    env["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    if host_bytes is None:
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    env.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(max(host_bytes >> 20, _BFC_MB)))


def prepare(env: Environment, environ: MutableMapping[str, str] | None = None) -> None:
    """Sets what torch and NCCL will read, where elasticrun has not: at init(), before torch has a thread that reads.

    What is right already is not written: setenv is no friend of threads that read.
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
    """For a collective on GPUs to end once this rank has launched it.

    A driver knows whether the others have launched it too, and judges; somebody who gave a timeout has judged.
    """
    env = os.environ if environ is None else environ
    own = ("ELASTIC_DRIVER", "ELASTIC_COLLECTIVE_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")
    if any(env.get(name) for name in own):
        return collective_timeout_s
    return min(collective_timeout_s, LAUNCHED_TIMEOUT_S)


def gpus_are_shared(environ: Mapping[str, str] | None = None) -> bool:
    """Whether NCCL (from 2.30 on) was told that several ranks may have one GPU."""
    env = os.environ if environ is None else environ
    return _switch(env, "NCCL_MULTI_RANK_GPU_ENABLE")


def allocator_chosen(environ: Mapping[str, str] | None = None) -> bool:
    """Whether somebody has chosen how this process's memory is allocated and given back."""
    env = os.environ if environ is None else environ
    return (
        any(env.get(name) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"))
        or "glibc.malloc." in env.get("GLIBC_TUNABLES", "")
        or any(name in env.get("LD_PRELOAD", "") for name in _ALLOCATORS)
    )


def failpoints(environ: Mapping[str, str] | None = None) -> str:
    """Rules of `elastic.failpoints`, not read yet. Empty: there are none."""
    env = os.environ if environ is None else environ
    return env.get("ELASTIC_FAILPOINTS", "").strip()


def worker(environ: Mapping[str, str] | None = None) -> Worker:
    """Who this process is, without looking at anything else that it was told."""
    env = os.environ if environ is None else environ
    try:
        return Worker.parse(env["ELASTIC_WORKER"])
    except (KeyError, ValueError):
        return Worker("localhost", 0, 1)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    value = _number(env, name, "seconds", default)
    if value == 0:
        raise Invalid(f"{name} is {env[name]!r}: set it to a number of seconds, more than 0")
    return value


def _number(env: Mapping[str, str], name: str, of: str, default: float) -> float:
    """A variable that is set but empty counts as not set, here and below."""
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


def _switch(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    text = env.get(name, "").strip().lower()
    value = _ON_OR_OFF.get(text) if text else default
    if value is None:
        raise Invalid(f"{name} is {env[name]!r}; set it to 1 or 0")
    return value


def _cores(env: Mapping[str, str]) -> tuple[int, ...]:
    text = env.get("HOROVOD_THREAD_AFFINITY", "")
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() for word in words):
        raise Invalid(
            f"HOROVOD_THREAD_AFFINITY is {text!r}: set it to the numbers of cores, one per worker of a host, as in"
            " 0,1,2,3"
        )
    return tuple(map(int, words))
