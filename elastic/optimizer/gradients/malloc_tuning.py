"""Tuning of glibc's malloc so that the process keeps the memory of gradients between steps.

The tuning is applied once per process.

The backward pass allocates every gradient, and the gradient is freed as soon as it was copied into its bucket. By
default, glibc returns large blocks to the system when they are freed, and in the next step the kernel allocates and
zeroes every page again. With the two thresholds set here, glibc keeps these blocks. Many small gradients at the end of
the heap are returned in the same way: in a step of a transformer with 0.85 M parameters, 1,500 page faults took 5 % of
the CPU time. The settings are not changed if the user has set thresholds or uses another allocator, or if the C library
has no such settings.
"""

from __future__ import annotations

import ctypes
from typing import Any

from elastic.rendezvous import worker_settings

# minimum total size of the gradients in bytes; malloc is not tuned for smaller ones
LARGE_BYTES = 1 << 20
# The maximum of glibc's own dynamic threshold. A fixed threshold below it would be worse than the default.
LEAST_THRESHOLD = 32 << 20
MOST_THRESHOLD = 64 << 20  # higher thresholds would increase fragmentation
_ROOM = 4096  # bytes for malloc's header and alignment, added to the largest gradient
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Free bytes that glibc keeps at the end of the heap, in addition to those of a step. At most two gradients exist at a
# time.
_MOST_KEPT = 256 << 20
_MAX_VALUE = (1 << 31) - 1  # maximum of int, the type of mallopt's argument


class MallocTuning:
    """Settings of this process's malloc.

    Args:
        libc: library with ``mallopt`` and ``malloc_trim``.
        may: whether the settings may be changed. False if the user has set them or uses another allocator.
    """

    def __init__(self, libc: Any, *, may: bool) -> None:
        self._mallopt = getattr(libc, "mallopt", None) if may else None
        self._malloc_trim = getattr(libc, "malloc_trim", None) if may else None
        self._threshold = 0
        self._kept = 0
        self._trimmed = False

    def keep(self, largest: int, freed: int = 0) -> None:
        """Make malloc keep the memory of freed gradients. The thresholds never decrease.

        Args:
            largest: size of the largest gradient in bytes.
            freed: number of bytes of gradients that a step frees, or that exist at the same time.
        """
        if self._mallopt is None or max(largest, freed) < LARGE_BYTES:
            return
        self._keep_at_the_end(min(_MOST_KEPT + freed, _MAX_VALUE))
        wanted = min(max(largest + _ROOM, LEAST_THRESHOLD), MOST_THRESHOLD)
        if wanted <= self._threshold:
            return
        first = self._threshold == 0
        # Older versions of glibc reject values above the maximum of their dynamic threshold.
        if self._mallopt(_M_MMAP_THRESHOLD, wanted) or (
            first and self._mallopt(_M_MMAP_THRESHOLD, LEAST_THRESHOLD)
        ):
            self._threshold = wanted

    def _keep_at_the_end(self, kept: int) -> None:
        if self._mallopt is not None and kept > self._kept:
            self._mallopt(_M_TRIM_THRESHOLD, kept)
            self._kept = kept

    def filled(self) -> None:
        """Return unused memory to the system, once.

        This method is called after the first buckets were filled, because only then do all gradients exist at the same
        time.
        """
        if self._threshold and not self._trimmed and self._malloc_trim is not None:
            self._trimmed = True
            self._malloc_trim(0)


_of_process: MallocTuning | None = None


def of_process() -> MallocTuning:
    """Return the malloc settings of this process."""
    global _of_process
    if _of_process is None:
        _of_process = MallocTuning(ctypes.CDLL(None), may=not worker_settings.allocator_chosen())
    return _of_process
