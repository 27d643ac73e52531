"""Hardware errors counted by the NVIDIA driver, read with nvidia-ml-py (extra ``gpu-usage``) if it is installed.

NVML counts uncorrected ECC errors and failed row remappings. It has no counter of Xid errors, only events.
"""

from __future__ import annotations

import importlib
from typing import Any


def found_on(uuid: str, nvml: Any = None) -> str:
    """Return the hardware errors of a GPU in one line, or an empty result if there are none or NVML is not
    available.
    """
    if not uuid:
        return ""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return ""
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except nvml.NVMLError:
        return ""
    return _ecc(nvml, gpu) or _rows(nvml, gpu)


def _ecc(nvml: Any, gpu: Any) -> str:
    try:
        count = nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError:  # without ECC
        return ""
    return f"{count} uncorrected ECC errors since the driver was loaded" if count else ""


def _rows(nvml: Any, gpu: Any) -> str:
    try:
        _, _, pending, failure = nvml.nvmlDeviceGetRemappedRows(gpu)
    except nvml.NVMLError:  # not supported by this GPU
        return ""
    if failure:
        return "a row of its memory could not be remapped"
    return "rows of its memory will be remapped at its next reset" if pending else ""
