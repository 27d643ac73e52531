"""Query of a worker's GPUs in a Spark task: ``get_available_devices``."""

from __future__ import annotations

import os


def get_available_devices() -> list[str]:
    """Return the indices of this worker's GPUs as strings. The list is empty if Spark has assigned none.

    A worker sees only the GPUs that Spark has assigned to the tasks of its executor, numbered from 0.
    """
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    slots = max(1, int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))
    each = max(1, len(seen) // slots)
    first = int(os.environ.get("HOROVOD_LOCAL_RANK", "0")) * each
    return [str(index) for index in range(len(seen))][first : first + each]


__all__ = ["get_available_devices"]
