"""Classification of exceptions caused by a GPU, its driver or NCCL rather than by the script, by type and error code.

One fault of a host's fabric affects all its GPUs with the same message at the same commit. Two equal exceptions of this
kind therefore do not prove an error of the script.
"""

from __future__ import annotations

import torch

from elastic.errors import DeviceLost

# CUDA error codes (cudaError_t) of faults in a device, its links or its driver. Faults of scripts are excluded: out of
# memory, a missing device, an invalid launch, and assertions in kernels (710, for example an index out of range).
_HARDWARE = {
    46,
    100,
    214,
    220,
    226,
    700,
    702,
    709,
    *range(714, 720),
    802,
    805,
    806,
    807,
    810,
    909,
    911,
    999,
}


def at_fault(error: BaseException) -> bool:
    """Return whether an exception that is about to end the process was caused by hardware."""
    verdict = _verdict(error)
    if verdict is None:
        try:
            _ask_the_device()
        except torch.AcceleratorError as lost:
            verdict = _verdict(lost)
    return bool(verdict)


def _verdict(error: BaseException | None) -> bool | None:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return False
        if isinstance(error, torch.AcceleratorError):
            code = getattr(error, "error_code", None)
            return code is None or code in _HARDWARE
        if isinstance(error, (DeviceLost, torch.distributed.DistBackendError)):
            return True
        error = error.__cause__
    return None


def _ask_the_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().query()
