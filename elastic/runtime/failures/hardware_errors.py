"""Which exceptions are the fault of a GPU, of its driver or of NCCL, and not of the script. Told by types and codes.

One fault of a host's fabric reaches all its GPUs with one text at one commit. Two equal exceptions of this kind
therefore prove nothing against the script.
"""

from __future__ import annotations

import torch

from elastic.errors import DeviceLost

# CUDA's codes (cudaError_t) of what a device, its links or its driver report; most end the context. Not in here: memory
# that ran out, a device that does not exist, a bad launch, and assertions in kernels (710: an index out of range, say).
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
    """Whether the hardware is to blame for this exception, which is about to end the process."""
    verdict = _verdict(error)
    if verdict is None:
        try:
            _ask_the_device()
        except torch.AcceleratorError as lost:
            verdict = _verdict(lost)
    return bool(verdict)


def _verdict(error: BaseException | None) -> bool | None:
    """None: its type says nothing."""
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
    """After an error that its context can't survive, a device refuses every question. Never waits."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().query()
