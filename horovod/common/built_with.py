"""Horovod's functions that query build options. MPI is not supported. Gloo and NCCL are the libraries in torch.

The argument ``verbose`` has no effect. In Horovod, it prints why a library could not be loaded.
"""

from __future__ import annotations

import torch


def mpi_threads_supported() -> bool:
    return False


def mpi_enabled(verbose: bool = False) -> bool:
    return False


def mpi_built(verbose: bool = False) -> bool:
    return False


def gloo_enabled(verbose: bool = False) -> bool:
    return True


def gloo_built(verbose: bool = False) -> bool:
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL as one number, such as 22105 for 2.21.5, or 0 if NCCL is not available."""
    if not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built(verbose: bool = False) -> bool:
    return False


def ccl_built(verbose: bool = False) -> bool:
    return False


def cuda_built(verbose: bool = False) -> bool:
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    return torch.version.hip is not None


def check_has_gpu() -> bool:
    return torch.cuda.is_available()


__all__ = [
    "ccl_built",
    "check_has_gpu",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]
