"""Collection of facts about this host for ``elasticrun doctor``, from the system and a separate process with torch.

When this module is run as a program on another host, it prints the facts as one line of JSON.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import platform
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from elastic.driver.commandline.setup import check_build
from elastic.driver.commandline.setup.host_checks import HostFacts
from elastic.driver.network.local_interfaces import own_addresses
from elastic.health import check
from elastic.version import __version__

SHM = "/dev/shm"
PACKAGES = ("elastic", "horovod")


def facts() -> HostFacts:
    """Return the facts of this host. Takes seconds, because a separate process imports torch."""
    build = check_build.probe()
    shm = None
    with contextlib.suppress(OSError):
        shm = shutil.disk_usage(SHM)
    health_code, health = check.check(None)
    others = (check_build.other_horovod(), check_build.other_elastic())
    return HostFacts(
        version=__version__,
        python=f"{platform.python_version()} at {sys.executable}",
        build=build,
        driver_gpus=_gpus(),
        port_trouble=_port_trouble(),
        addresses=[
            f"{each.address} ({each.name})"
            for each in own_addresses()
            if each.up and not each.loopback and not each.link_local
        ],
        shm_bytes=None if shm is None else shm.total,
        shm_free=0 if shm is None else shm.free,
        foreign=foreign_files(check_build.DISTRIBUTION),
        health_code=health_code,
        health=health,
        others=[each for each in others if each],
        at=time.time(),
    )


def foreign_files(distribution: str) -> list[str]:
    """Return the files in an installed package that are missing from its RECORD or differ from it.

    The result is empty for a checkout, which has no RECORD.
    """
    try:
        recorded = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return []
    ours = {str(each.locate()): each.hash for each in recorded if each.parts[0] in PACKAGES}
    roots = {
        Path(str(each.locate())).parents[len(each.parts) - 2]
        for each in recorded
        if each.parts[0] in PACKAGES
    }
    found = []
    for root in sorted(roots):
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each != "__pycache__"]
            for file in files:
                path = os.path.join(folder, file)
                kept = ours.get(path)
                changed = path not in ours or (
                    kept is not None and _digest(path, kept.mode) != kept.value
                )
                if changed and not file.endswith(".pyc"):
                    found.append(path)
    return sorted(found)


def _digest(path: str, mode: str) -> str:
    with open(path, "rb") as file:
        digest = hashlib.new(mode, file.read()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _gpus() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def _port_trouble() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname()[:2], 2.0):
                server.accept()[0].close()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


if __name__ == "__main__":
    print(msgspec.json.encode(facts()).decode(), flush=True)
