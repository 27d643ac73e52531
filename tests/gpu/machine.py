"""Equipment of this machine for jobs on GPUs, and the number of ranks that it allows. Looking is done in a process
of its own: whoever starts cases never touches CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOOK_S = 300.0  # the first import of torch on a machine may take a minute
NEEDED = [
    "torch",
    "numpy",
    "msgspec",
    "cloudpickle",
    "yaml",
    "prometheus_client",
    "psutil",
    "rich",
    "tenacity",
]
SHARING = (2, 30)  # from this NCCL on two ranks may have one GPU
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


@dataclass(frozen=True)
class Machine:
    """``ranks`` can meet in NCCL here; ``why_few`` says why it is only one. ``versions`` go into every result."""

    gpus: int
    ranks: int
    why_few: str
    versions: dict[str, Any]
    made_up: bool
    small: bool

    @property
    def shares_a_gpu(self) -> bool:
        return self.ranks > max(1, self.gpus)

    @property
    def time_factor(self) -> float:
        """Times are limits on a GPU; a made-up one computes on the cores that everything else uses."""
        return 8.0 if self.made_up else 1.0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read(path: Path) -> Machine:
    return Machine(**json.loads(path.read_text()))


def missing() -> list[str]:
    """Python modules that hvd-elastic needs and that can't be imported by this interpreter."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def look(ranks: int | None, small: bool | None) -> Machine:
    """Raises RuntimeError with a sentence where nothing can be looked at. None: what the machine allows."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=LOOK_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"torch can't be asked about GPUs:\n{done.stderr.strip()[-2000:]}")
    seen = json.loads(done.stdout.splitlines()[-1])
    possible, why_few = ranks_possible(seen["gpus"], tuple(seen["versions"]["nccl"]))
    made_up = "FAKE_CUDA_SHARED" in os.environ
    return Machine(
        gpus=seen["gpus"],
        ranks=min(possible, ranks or 2),
        why_few=why_few if ranks is None or ranks > possible else f"{ranks} asked for",
        versions=seen["versions"],
        made_up=made_up,
        small=made_up if small is None else small,
    )


def ranks_possible(gpus: int, nccl: tuple[int, ...]) -> tuple[int, str]:
    """How many ranks can meet in NCCL, and if it is one, why."""
    if gpus != 1:
        return gpus, ""
    if nccl >= SHARING:
        return 2, ""
    found, wanted = (".".join(map(str, each)) for each in (nccl, SHARING))
    return 1, (
        f"there is one GPU, and NCCL {found} refuses two ranks on it; from {wanted} on it allows them: install"
        " nvidia-nccl-cu13 2.30 or newer, or name its libnccl.so.2 with --nccl"
    )


def _nccl_loaded() -> list[int]:
    """The version of the library in use. Torch only knows the one that it was built with."""
    sys.path.insert(0, str(ROOT))
    from elastic.collectives import nccl_library

    library = nccl_library._linked()
    if library is None:
        return []
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return [code.value // 10_000, code.value // 100 % 100, code.value % 100]


def _describe() -> dict[str, Any]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(smi, capture_output=True, text=True, timeout=20, check=False).stdout
    except OSError:
        driver = ""
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_loaded(),
        "driver": (driver.split() or ["unknown"])[0],
        "gpu": torch.cuda.get_device_name(0) if gpus else "",
        "gpu_gb": round(torch.cuda.mem_get_info(0)[1] / 1e9, 1) if gpus else 0,
    }
    return {"gpus": gpus, "versions": versions}


if __name__ == "__main__":
    print(json.dumps(_describe()))
