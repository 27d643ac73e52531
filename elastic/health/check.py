"""Built-in health check, which prints one line and exits with 0 (passed), 1 (failed) or 3 (wrong result).

    python -m elastic.health.check      in the environment of a worker, whose slot ELASTIC_SLOT is the GPU to check

torch is imported only on hosts with GPUs, where the import takes most of the time.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from elastic.health import gpu_errors, known_answers
from elastic.health.exit_codes import FAILED, PASSED, WRONG_RESULT


def gpus_here() -> bool:
    """Return whether this host may have GPUs that torch can use. This function does not import torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")


def check(slot: int | None) -> tuple[int, str]:
    """Check the CPUs, and the GPU of a slot (all GPUs if None). Return the exit code and a summary line."""
    if wrong := known_answers.wrong_on_cpu():
        return WRONG_RESULT, f"cpu: {wrong}"
    if not gpus_here():
        return PASSED, "cpu: all results are right"
    import torch

    count = torch.cuda.device_count()
    indices = [*range(count)] if slot is None or not count else [slot % count]
    for index in indices:
        code, line = _check_gpu(torch, index)
        if code:
            return code, line
    named = ", ".join(["cpu", *(f"cuda:{index}" for index in indices)])
    return PASSED, f"{named}: all results are right"


def _check_gpu(torch: Any, index: int) -> tuple[int, str]:
    device = f"cuda:{index}"
    try:
        found = gpu_errors.watch(str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))
        if wrong := known_answers.wrong_on_gpu(torch, device):
            return WRONG_RESULT, f"{device}: {wrong}"
        error = found()
    except RuntimeError as failure:
        # CUDA raises different exceptions if memory is exhausted or corrupted, or if the GPU is lost.
        return FAILED, f"{device}: {str(failure).strip().partition(chr(10))[0]}"
    return (FAILED, f"{device}: {error}") if error else (PASSED, "")


def main() -> int:
    slot = os.environ.get("ELASTIC_SLOT", "")
    code, line = check(int(slot) if slot.isdecimal() else None)
    print(line, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
