"""For a process on the fake GPUs: torch calls `install` at the end of its import (its entry point for backends).

Test scripts may ask for more: ``import fake_cuda; fake_cuda.contexts()``.
"""

from __future__ import annotations

import ctypes


def install() -> None:
    import torch

    operators = ctypes.CDLL("libfakeoperators.so")
    assert operators.fake_cuda_install() > 1000, (
        "torch has too few operators for CUDA: is this the CUDA build?"
    )
    # No kernels are computed. Torch then uses those that `operators.cpp` replaces.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def contexts() -> list[int]:
    """Return the devices that this process has initialized: each costs hundreds of megabytes on a real GPU."""
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.fake_cuda_contexts.restype = ctypes.c_ulong
    bits = runtime.fake_cuda_contexts()
    return [device for device in range(64) if bits >> device & 1]


def held() -> dict[str, int]:
    """Return this process's current resources, which a leak would increase: bytes, stream threads, communicators."""
    runtime, nccl = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libnccl.so.2")
    runtime.fake_cuda_bytes.restype = ctypes.c_ulong
    for each in (runtime.fake_cuda_streams, nccl.fake_nccl_communicators):
        each.restype = ctypes.c_long
    return {
        "device bytes": runtime.fake_cuda_bytes(ctypes.c_bool(True)),
        "pinned bytes": runtime.fake_cuda_bytes(ctypes.c_bool(False)),
        "streams": runtime.fake_cuda_streams(),
        "communicators": nccl.fake_nccl_communicators(),
    }


COUNTS = (
    "launches",
    "launched_bytes",
    "copies",
    "copied_bytes",
    "synchronizations",
    "queries",
    "events",
    "stream_waits",
    "allocations",
    "collectives",
    "collective_bytes",
)  # in the order of `Count` in runtime.h


def counts() -> dict[str, int]:
    """Return the calls of this process to the GPU and NCCL so far. Bytes are those of a real GPU."""
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.fake_cuda_count.restype = ctypes.c_ulong
    return {name: runtime.fake_cuda_count(number) for number, name in enumerate(COUNTS)}
