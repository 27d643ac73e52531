"""Keeps the memory of large gradients in the process from one step to the next. Acts on the C library, once.

Backward makes every gradient anew, and it is freed as soon as it is in its bucket. glibc gives such large pieces back
to the system, which hands them out again in the next step page by page, each filled with zeros first. With the two
thresholds set here it keeps them. Many small ones are as much, where they lie at the end of the heap: a step of a
transformer of 0.85 M parameters found 1,500 pages anew, a twentieth of its processor time. Does nothing where the user
has chosen thresholds or another allocator, or where the C library has none to choose.
"""

from __future__ import annotations

import ctypes
from typing import Any

from elastic.rendezvous import environment

LARGE_BYTES = 1 << 20  # below that, glibc keeps what is freed anyway
# What glibc's own threshold may rise to as long as nobody sets it: never set it lower.
LEAST_THRESHOLD = 32 << 20
MOST_THRESHOLD = 64 << 20  # the larger the pieces, the more is lost between them
_ROOM = 4096  # a piece is asked for with its header and its alignment, and has to stay below the threshold
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Bytes at the end of the heap: a gradient is freed before the next but one is made.
_MOST_KEPT = 256 << 20
_MOST_TOLD = (1 << 31) - 1  # mallopt takes an int


class MallocTuning:
    """``libc``: where ``mallopt`` and ``malloc_trim`` are looked up. ``may``: whether that is ours to do."""

    def __init__(self, libc: Any, *, may: bool) -> None:
        self._mallopt = getattr(libc, "mallopt", None) if may else None
        self._malloc_trim = getattr(libc, "malloc_trim", None) if may else None
        self._threshold = 0
        self._kept = 0
        self._trimmed = False

    def keep(self, largest: int, freed: int = 0) -> None:
        """From now on: ``largest`` is the size of the largest gradient, and a step frees so many bytes of gradients, or
        has them wait at once. Never less than what was asked before.
        """
        if self._mallopt is None or max(largest, freed) < LARGE_BYTES:
            return
        self._keep_at_the_end(min(_MOST_KEPT + freed, _MOST_TOLD))
        wanted = min(max(largest + _ROOM, LEAST_THRESHOLD), MOST_THRESHOLD)
        if wanted <= self._threshold:
            return
        first = self._threshold == 0
        # Older versions refuse more than they would rise to by themselves.
        if self._mallopt(_M_MMAP_THRESHOLD, wanted) or (
            first and self._mallopt(_M_MMAP_THRESHOLD, LEAST_THRESHOLD)
        ):
            self._threshold = wanted

    def _keep_at_the_end(self, kept: int) -> None:
        if self._mallopt is not None and kept > self._kept:
            self._mallopt(_M_TRIM_THRESHOLD, kept)
            self._kept = kept

    def filled(self) -> None:
        """The first buckets were: the gradients they were filled from, all at once, are never needed so again."""
        if self._threshold and not self._trimmed and self._malloc_trim is not None:
            self._trimmed = True
            self._malloc_trim(0)


_of_process: MallocTuning | None = None


def of_process() -> MallocTuning:
    """This process's; it has one allocator."""
    global _of_process
    if _of_process is None:
        _of_process = MallocTuning(ctypes.CDLL(None), may=not environment.allocator_chosen())
    return _of_process
