"""Detection, by type and error code, of exceptions caused by a GPU, its driver or NCCL rather than by the script.

A single fault in a host's GPU fabric makes all its GPUs fail with the same message at the same commit. Two equal
exceptions of this kind therefore do not prove that the script is wrong.
"""

from __future__ import annotations

import torch

from elastic.errors import DeviceLost

# CUDA error codes (cudaError_t) for faults of a device, its links or its driver. Errors that scripts cause are
# excluded: out of memory, a missing device, an invalid launch, and assertions in kernels (710, such as an index out of
# range).
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
    """Return whether hardware caused an exception that is about to end the process."""
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
