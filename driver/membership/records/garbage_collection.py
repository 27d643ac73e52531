"""Suspension of garbage collection while many objects are created. Makes no decisions."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection.

    While many long-lived objects are created, garbage collection traverses the objects of all workers several times,
    and finds no garbage.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
