"""Report of ``--check-build``. A separate process queries torch, so torch is not loaded here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from elastic.conflicting_packages import remedy

DISTRIBUTION = "hvd-elastic"

_PROBE = """
import json, torch
import torch.distributed as d
from elastic.collectives.shared_memory import arena
from elastic.collectives.shared_memory import native_library as library
there = d.is_available()
arena.mine()
print(json.dumps({
    "torch": torch.__version__,
    "gloo": there and d.is_gloo_available(),
    "nccl": there and d.is_nccl_available(),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()))
        if there and d.is_nccl_available() and torch.cuda.is_available() else "",
    "gpus": torch.cuda.device_count(),
    "shared": library.missing() or arena.why_not(),
}))
"""


@dataclass(frozen=True)
class Build:
    """Properties of the installed torch and other frameworks, as found by `probe`.

    ``trouble`` describes the problem, as a clause, if torch could not be queried.
    """

    torch: str = ""
    gloo: bool = False
    nccl: bool = False
    nccl_version: str = ""  # NCCL's version; empty without a GPU
    gpus: int = 0
    shared: str = ""  # reason why ranks on this host cannot share memory; empty if they can
    tensorflow: str = ""  # version; empty if not installed, as for the two following fields
    keras: str = ""
    mxnet: str = ""
    trouble: str = ""


def version() -> str:
    """Return the version of this package."""
    return _version_of(DISTRIBUTION) or "unknown, not installed"


def other_horovod() -> str | None:
    """Return a warning if Horovod is installed in addition to this package, which replaces Horovod; otherwise None."""
    found = _version_of("horovod")
    if found is None:
        return None
    return (
        f"Horovod {found} is also installed here, and `import horovod` finds only one of the two; remove it"
        " with: pip uninstall horovod"
    )


def other_elastic() -> str | None:
    """Return a warning if the unrelated package ``elastic`` (elastic constants of crystals) is installed.

    Otherwise return None.
    """
    found = _version_of("elastic")
    if found is None:
        return None
    return (
        f"the package elastic {found} (elastic constants) is also installed here, in the folder of hvd-elastic;"
        f" {remedy('elastic')}"
    )


def probe(python: str = sys.executable, timeout_s: float = 120.0) -> Build:
    """Query torch in a separate process, which may take seconds. The result describes any error."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Build(trouble=f"importing torch has not finished within {timeout_s:g} s")
    except OSError as error:
        return Build(trouble=f"{python} can't be started: {error.strerror}")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Build(trouble=f"torch can't be imported: {last}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        return Build(
            **json.loads(last),
            tensorflow=_version_of("tensorflow") or _version_of("tensorflow-cpu") or "",
            keras=_version_of("keras") or "",
            mxnet=_version_of("mxnet") or "",
        )
    except (ValueError, TypeError):
        return Build(trouble=f"{last!r} is not a report about torch")


def describe(build: Build) -> str:
    """Return the report in the format of ``horovodrun --check-build``."""

    def box(available: bool) -> str:
        return "[X]" if available else "[ ]"

    sharing = bool(build.torch) and not build.shared
    why = f": {build.shared}" if build.shared else ""
    gpus = f", {build.gpus} GPU{'s' if build.gpus != 1 else ''} here" if build.nccl else ""
    lines = [
        f"elasticrun {version()}:",
        "",
        "Available Frameworks:",
        f"    {box(bool(build.tensorflow))} TensorFlow {build.tensorflow}".rstrip(),
        f"    {box(bool(build.keras))} Keras {build.keras}".rstrip(),
        f"    {box(bool(build.torch))} PyTorch {build.torch}".rstrip(),
        f"    {box(bool(build.mxnet))} MXNet {build.mxnet}".rstrip(),
        "",
        "Available Controllers:",
        "    [ ] MPI",
        f"    {box(build.gloo)} Gloo",
        "",
        "Available Tensor Operations:",
        f"    {box(build.nccl)} NCCL{gpus}",
        "    [ ] DDL",
        "    [ ] CCL",
        "    [ ] MPI",
        f"    {box(build.gloo)} Gloo",
        f"    {box(sharing)} shared memory, between workers of a host{why}",
    ]
    notes = [note for note in (build.trouble, other_horovod(), other_elastic()) if note]
    return "\n".join([*lines, *(f"\nwarning: {note}" for note in notes)])


def _version_of(distribution: str) -> str | None:
    # Import on demand: importing this module is slow, because it loads the mail parser and sockets.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
