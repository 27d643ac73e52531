"""Evaluation of a host's facts: checks, and remedies for failed checks. Pure: no I/O, no clock."""

from __future__ import annotations

import enum

import msgspec

from elastic.conflicting_packages import remedy
from elastic.driver.commandline.setup.check_build import Build
from elastic.driver.reasons import counted

SHM_LEAST = 1 << 30  # minimum size of /dev/shm, in bytes; the default in a container is only 64 MiB
CLOCKS_S = 1.0  # maximum difference between clocks, in seconds
NAMED = 3


class HostFacts(msgspec.Struct, frozen=True):
    """Facts of one host that `checks` evaluates.

    Args:
        at: time at which the facts were collected, in seconds since 1970.
    """

    version: str
    python: str
    at: float
    build: Build
    driver_gpus: int  # number of GPUs that the kernel driver lists
    # reason why ports on loopback cannot be used; empty if they can
    port_trouble: str
    addresses: list[str]  # addresses with their interfaces, without loopback
    shm_bytes: int | None  # size of /dev/shm in bytes, or None if it is missing
    shm_free: int
    # files in this package's installed folders that were modified or do not belong to it
    foreign: list[str]
    health_code: int  # exit code of the built-in health check: 0, 1, or 3 for a wrong result
    health: str  # text output of the built-in health check
    # installed packages that are known to put files into the folders of this package
    others: list[str]


class Level(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True):
    """Result of one check of a host.

    Args:
        do: remedy for the user; empty if ``level`` is OK.
    """

    what: str
    level: Level
    found: str
    do: str = ""


def checks(
    host: HostFacts, *, version: str, several: bool, ahead_s: float | None = None
) -> list[Check]:
    """Return all checks of a host.

    Args:
        host: facts of the host.
        version: version of hvd-elastic on this machine.
        several: whether other hosts are checked as well.
        ahead_s: seconds by which the host's clock is ahead of this machine's. None means unknown.
    """
    return [
        _versions(host, version),
        _torch(host),
        _library(host),
        _gpus(host),
        _health(host),
        _ports(host),
        _interfaces(host, several=several),
        _memory(host),
        *_clock(ahead_s),
        _packages(host),
    ]


def _versions(host: HostFacts, version: str) -> Check:
    found = f"hvd-elastic {host.version}, Python {host.python}"
    if host.version == version:
        return Check("version", Level.OK, found)
    return Check("version", Level.FAIL, found, f"install hvd-elastic=={version}, as here")


def _torch(host: HostFacts) -> Check:
    build = host.build
    if build.trouble:
        return Check("torch", Level.FAIL, build.trouble, "install torch: pip install torch")
    if not build.gloo:
        return Check(
            "torch", Level.FAIL, f"{build.torch} without Gloo", "install a torch with Gloo"
        )
    return Check("torch", Level.OK, f"{build.torch}, with Gloo")


def _library(host: HostFacts) -> Check:
    if host.build.trouble:
        return Check("library", Level.WARN, "not tried: torch is missing", "install torch first")
    if not host.build.shared:
        return Check("library", Level.OK, "workers of a host reduce in shared memory")
    do = "elasticrun docs install; without it tensors are sent over Gloo, which is slower"
    return Check("library", Level.WARN, host.build.shared, do)


def _gpus(host: HostFacts) -> Check:
    build, gpus = host.build, counted(host.build.gpus, "GPU")
    if host.driver_gpus > build.gpus:
        found = f"torch sees {build.gpus} of {counted(host.driver_gpus, 'GPU')}"
        do = "install torch's CUDA build for this driver, and check CUDA_VISIBLE_DEVICES"
        return Check("GPUs, NCCL", Level.WARN, found, do)
    if not build.gpus:
        return Check("GPUs, NCCL", Level.OK, "no GPU; training on CPUs")
    if not build.nccl:
        return Check("GPUs, NCCL", Level.FAIL, f"{gpus}, no NCCL", "install torch's CUDA build")
    return Check("GPUs, NCCL", Level.OK, f"{gpus}, NCCL {build.nccl_version}".rstrip())


def _health(host: HostFacts) -> Check:
    """Return the result of the built-in health check, which tests the CPUs and all GPUs."""
    if not host.health_code:
        return Check("health", Level.OK, host.health)
    do = "do not train on this host until its hardware has been tested or replaced"
    return Check("health", Level.FAIL, host.health, do)


def _ports(host: HostFacts) -> Check:
    if not host.port_trouble:
        return Check("ports", Level.OK, "a loopback port can be opened and reached")
    do = "allow loopback connections in the firewall of this host"
    return Check("ports", Level.FAIL, f"loopback: {host.port_trouble}", do)


def _interfaces(host: HostFacts, *, several: bool) -> Check:
    if host.addresses:
        more = len(host.addresses) - NAMED
        found = ", ".join(host.addresses[:NAMED]) + (f" and {more} more" if more > 0 else "")
        return Check("network", Level.OK, found)
    level = Level.FAIL if several else Level.OK
    do = "connect this host to a network" if several else ""
    return Check("network", level, "loopback only", do)


def _memory(host: HostFacts) -> Check:
    do = "enlarge /dev/shm if DataLoaders use num_workers: docker run --shm-size=8g"
    if host.shm_bytes is None:
        return Check("shared memory", Level.WARN, "there is no /dev/shm", do)
    found = f"/dev/shm has {host.shm_bytes / 1e9:.1f} GB, {host.shm_free / 1e9:.1f} GB free"
    enough = host.shm_free >= SHM_LEAST
    return Check("shared memory", Level.OK if enough else Level.WARN, found, "" if enough else do)


def _clock(ahead_s: float | None) -> list[Check]:
    if ahead_s is None:
        return []
    if abs(ahead_s) <= CLOCKS_S:
        return [Check("clock", Level.OK, f"within {CLOCKS_S:g} s of this host's")]
    relation = "ahead of" if ahead_s > 0 else "behind"
    found = f"{abs(ahead_s):.1f} s {relation} this host's"
    return [
        Check(
            "clock",
            Level.WARN,
            found,
            "run an NTP client there; otherwise timestamps in logs and timelines are misleading",
        )
    ]


def _packages(host: HostFacts) -> Check:
    if not host.foreign and not host.others:
        return Check(
            "packages", Level.OK, "no other package has files in the folders of hvd-elastic"
        )
    if not host.foreign:
        return Check("packages", Level.WARN, host.others[0], "use separate environments")
    more = len(host.foreign) - NAMED
    named = ", ".join(host.foreign[:NAMED]) + (f" and {more} more" if more > 0 else "")
    found = f"files of other packages: {named}"
    package = "horovod" if "/horovod/" in host.foreign[0] else "elastic"
    return Check("packages", Level.FAIL, found, remedy(package))
