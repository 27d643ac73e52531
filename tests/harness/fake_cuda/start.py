"""Starts processes on fake GPUs: `environment` has their variables. See README.md.

By hand: ``python tests/harness/fake_cuda/start.py 3 python train.py`` runs a command on three.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TORCH = os.environ.get("FAKE_CUDA_TORCH", "2.13.0")
FOLDER = Path(  # outside of git
    os.environ.get("FAKE_CUDA_FOLDER", ROOT / "build" / f"fakecuda-{TORCH}")
)
BUILT = FOLDER / "built"  # contains the digest of its sources


def sources() -> str:
    """Return a digest of everything that affects the build."""
    files = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "build.py"])
    content = [TORCH.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"".join(content)).hexdigest()


def missing() -> str | None:
    """Return why no process can be started; None if everything exists."""
    if not BUILT.exists():
        return "the made-up CUDA is not built; run: make fakecuda"
    if BUILT.read_text() != sources():
        return f"the made-up CUDA in {FOLDER} is older than its sources, or not for torch {TORCH}; run: make fakecuda"
    return None


def environment(shared: Path, *, gpus: int = 2, **settings: str) -> dict[str, str]:
    """Variables for a process, to be added to its others. ``import torch`` then gives the CUDA build.

    Processes that are to meet in NCCL have the same folder ``shared``: best in /dev/shm. Settings go by the names in
    README.md, in capitals: ``environment(folder, FAKE_FAULTS="kernel:die,rank=1,nth=5")``.
    """
    reason = missing()
    if reason is not None:
        raise FileNotFoundError(reason)
    return {
        "LD_LIBRARY_PATH": str(FOLDER / "lib"),
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "site"), str(HERE / "worker")]),
        "FAKE_GPUS": str(gpus),
        "FAKE_CUDA_SHARED": str(shared),
        "OMP_NUM_THREADS": "1",
        **settings,
    }


def main() -> int:
    gpus, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        variables = os.environ | environment(Path(shared), gpus=int(gpus))
        return subprocess.run(command, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main())
