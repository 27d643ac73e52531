"""Says what is available here, for ``--check-build``. Torch is asked in a process of its own: none is loaded here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from elastic.other_packages import remedy

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
    """What a probe found; ``trouble`` is a clause, set when torch could not be asked."""

    torch: str = ""
    gloo: bool = False
    nccl: bool = False
    nccl_version: str = ""  # where there is a GPU
    gpus: int = 0
    shared: str = ""  # why ranks of this host can't share memory; empty where they can
    tensorflow: str = ""  # its version
    keras: str = ""
    mxnet: str = ""
    trouble: str = ""


def version() -> str:
    """Our own version."""
    return _version_of(DISTRIBUTION) or "unknown, not installed"


def other_horovod() -> str | None:
    """A sentence of warning if Horovod itself is installed here too, else None."""
    found = _version_of("horovod")
    if found is None:
        return None
    return (
        f"Horovod {found} is installed here too, and `import horovod` finds only one of the two;"
        " remove it with: pip uninstall horovod"
    )


def other_elastic() -> str | None:
    """The same of the package elastic, which computes elastic constants."""
    found = _version_of("elastic")
    if found is None:
        return None
    return (
        f"the package elastic {found} (elastic constants) is installed here too, in the folder of hvd-elastic;"
        f" {remedy('elastic')}"
    )


def probe(python: str = sys.executable, timeout_s: float = 120.0) -> Build:
    """Imports torch in a process of its own; from a cold disk that takes a while. Never raises for what it finds."""
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
    """The report, in the form of horovodrun's."""

    def box(there: bool) -> str:
        return "[X]" if there else "[ ]"

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
    from importlib import metadata  # brings the parser of mails, and sockets with it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
