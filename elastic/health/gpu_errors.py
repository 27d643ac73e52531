"""Hardware errors reported by the NVIDIA driver, read with nvidia-ml-py (extra ``gpu-usage``) if it is installed.

NVML counts uncorrected ECC errors and failed row remappings. It does not count Xid errors, but reports those that occur
while it watches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Xid errors that are caused by programs and not by hardware: engine exceptions, page faults, stopped channels and their
# cleanup, video errors, timeouts.
OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
XIDS = 64  # maximum number of events to read


def watch(uuid: str, nvml: Any = None) -> Callable[[], str]:
    """Start recording the Xid errors of a GPU.

    Args:
        uuid: UUID of the GPU.
        nvml: the NVML module (default: pynvml, if it is installed).

    Returns:
        A function that returns the GPU's hardware errors in one line, or an empty string if there are none or NVML is
        unavailable. Call it once.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return str
    if not uuid:
        return str
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except nvml.NVMLError:
        return str
    events = _events(nvml, gpu)
    return lambda: _ecc(nvml, gpu) or _rows(nvml, gpu) or _xid(nvml, events)


def _events(nvml: Any, gpu: Any) -> Any:
    """Return an NVML event set that receives the Xid errors of a GPU, or None if the GPU does not report any."""
    try:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _xid(nvml: Any, events: Any) -> str:
    if events is None:
        return ""
    try:
        for _ in range(XIDS):
            xid = nvml.nvmlEventSetWait_v2(events, 0).eventData
            if xid not in OF_PROGRAMS:
                return f"Xid error {xid} during the check"
    except nvml.NVMLError:  # NVML raises an error if no more events are queued.
        pass
    finally:
        nvml.nvmlEventSetFree(events)
    return ""


def _ecc(nvml: Any, gpu: Any) -> str:
    try:
        count = nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError:  # GPUs without ECC do not support this query.
        return ""
    return f"{count} uncorrected ECC errors since the driver was loaded" if count else ""


def _rows(nvml: Any, gpu: Any) -> str:
    try:
        _, _, pending, failure = nvml.nvmlDeviceGetRemappedRows(gpu)
    except nvml.NVMLError:  # raised if the GPU does not support the query
        return ""
    if failure:
        return "a row of its memory could not be remapped"
    return "rows of its memory will be remapped at its next reset" if pending else ""
