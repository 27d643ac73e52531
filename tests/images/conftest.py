"""The image, built once for a run of the tests, and containers of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.program import Program

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd-elastic" / "images"
PROGRAMS = ("podman", "buildah", "debootstrap", "runc", "netavark", "aardvark-dns", "iptables")
# The last three are podman's network, which Debian only recommends beside it; two stand in a folder of their own.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/lib/podman"])
BUILD_S = 1800
# What works without rights that containers in containers lack, too.
SETTINGS = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
AS_PODS_ARE = [
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp"),
    *("--cap-drop=all", "--security-opt=no-new-privileges"),
]


@dataclass(frozen=True)
class Image:
    name: str
    digest: str
    packed_mb: int


def podman(*words: str, timeout: float = 60.0) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"podman {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def working() -> set[str]:
    """Containers that buildah works in."""
    words = ["buildah", "containers", "--quiet"]
    return {*subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60).stdout.split()}


def build(tag: str, **settings: str) -> Image:
    """By images/build.sh. Nothing of a build that is broken off goes on, and nothing is left of it."""
    before = working()
    program = Program(
        ["nice", str(ROOT / "images/build.sh"), "hvd-elastic", str(CACHE)],
        folder=ROOT,
        env=os.environ | {"TAG": tag, "PYTHON": sys.executable} | settings,
        mark="ELASTIC_TEST_BUILD",
        called="images/build.sh",
    )
    try:
        output = program.succeed(BUILD_S)
    finally:
        program.end()
        for container in working() - before:
            subprocess.run(["buildah", "rm", container], stdout=subprocess.DEVNULL, timeout=60)
    said = dict(re.findall(r"^(\w+) +(\S+)", output, re.MULTILINE))
    return Image(said["image"], said["digest"], int(said["packed"]))


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of podman and buildah."""
    file = tmp_path_factory.mktemp("containers") / "containers.conf"
    file.write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(file))
        yield


@pytest.fixture(scope="session")
def image(settings: None) -> Image:
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if os.geteuid() != 0:
        pytest.skip("THE IMAGE IS NOT TESTED: building it takes root")
    if missing:
        pytest.skip(f"THE IMAGE IS NOT TESTED: apt-get install {' '.join(missing)}")
    return build("tested")


Run = Callable[..., Program]


@pytest.fixture
def run(image: Image, tmp_path: Path) -> Iterator[Run]:
    """``run(*command, flags=...)``: a container of the image, as strict as pods of the chart are."""
    started: list[tuple[str, Program]] = []

    def start(*command: str, name: str = "", flags: Sequence[str] = ()) -> Program:
        name = name or f"test-{uuid.uuid4().hex[:8]}"
        words = ["podman", "run", "--rm", "--name", name, *AS_PODS_ARE, *flags]
        program = Program(
            [*words, image.name, *command],
            folder=tmp_path,
            env=os.environ,
            mark="ELASTIC_TEST_CONTAINER",
            called=name,
        )
        started.append((name, program))
        return program

    yield start
    for name, program in started:
        subprocess.run(["podman", "rm", "--force", "--time", "0", name], capture_output=True)
        program.end()


@pytest.fixture
def network(image: Image) -> Iterator[str]:
    """One with name service, for this test alone."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    podman("network", "create", name)
    yield name
    podman("network", "rm", "--force", "--time", "0", name)


def config(image: Image) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads(podman("image", "inspect", image.name))[0]["Config"]
    return found
