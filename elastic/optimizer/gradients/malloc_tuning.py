"""Tuning of glibc's malloc that keeps the memory of gradients in the process between steps. Applied once per process.

The backward pass allocates every gradient, which is freed as soon as it was copied into its bucket. By default, glibc
returns such large blocks to the system, and in the next step the kernel allocates them again, page by page and filled
with zeros. With the two thresholds set here, glibc keeps them. Many small gradients at the end of the heap are
returned in the same way: in a step of a transformer with 0.85 M parameters, 1,500 page faults took 5 % of the CPU time.
Nothing is done if the user has set thresholds or uses another allocator, or if the C library has no such settings.
"""

from __future__ import annotations

import ctypes
from typing import Any

from elastic.rendezvous import environment

LARGE_BYTES = 1 << 20  # block size in bytes below which glibc keeps freed blocks
# Maximum of glibc's dynamic threshold. A fixed threshold must not be lower.
LEAST_THRESHOLD = 32 << 20
MOST_THRESHOLD = 64 << 20  # a larger threshold would cause more fragmentation
_ROOM = 4096  # number of bytes for header and alignment, which must stay below the threshold
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Bytes to keep at the end of the heap. At most two gradients exist at a time.
_MOST_KEPT = 256 << 20
_MOST_TOLD = (1 << 31) - 1  # limited to the range of int, the type of mallopt's argument


class MallocTuning:
    """Settings of malloc in a process.

    Args:
        libc: library with ``mallopt`` and ``malloc_trim``.
        may: whether the settings may be changed, which the user or another allocator can prevent.
    """

    def __init__(self, libc: Any, *, may: bool) -> None:
        self._mallopt = getattr(libc, "mallopt", None) if may else None
        self._malloc_trim = getattr(libc, "malloc_trim", None) if may else None
        self._threshold = 0
        self._kept = 0
        self._trimmed = False

    def keep(self, largest: int, freed: int = 0) -> None:
        """Make malloc keep the memory of freed gradients. The limits never decrease.

        Args:
            largest: size of the largest gradient in bytes.
            freed: number of bytes of gradients that a step frees, or that exist at the same time.
        """
        if self._mallopt is None or max(largest, freed) < LARGE_BYTES:
            return
        self._keep_at_the_end(min(_MOST_KEPT + freed, _MOST_TOLD))
        wanted = min(max(largest + _ROOM, LEAST_THRESHOLD), MOST_THRESHOLD)
        if wanted <= self._threshold:
            return
        first = self._threshold == 0
        # Older versions reject values above the maximum of their dynamic threshold.
        if self._mallopt(_M_MMAP_THRESHOLD, wanted) or (
            first and self._mallopt(_M_MMAP_THRESHOLD, LEAST_THRESHOLD)
        ):
            self._threshold = wanted

    def _keep_at_the_end(self, kept: int) -> None:
        if self._mallopt is not None and kept > self._kept:
            self._mallopt(_M_TRIM_THRESHOLD, kept)
            self._kept = kept

    def filled(self) -> None:
        """Return unused memory to the system after the first buckets were filled, because only then do all gradients
        exist at once."""
        if self._threshold and not self._trimmed and self._malloc_trim is not None:
            self._trimmed = True
            self._malloc_trim(0)


_of_process: MallocTuning | None = None


def of_process() -> MallocTuning:
    """Return the settings of this process."""
    global _of_process
    if _of_process is None:
        _of_process = MallocTuning(ctypes.CDLL(None), may=not environment.allocator_chosen())
    return _of_process
