"""Handles: the integers that stand for collectives under way, from submission to `synchronize`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.collectives.interface import Work
from elastic.errors import Invalid, PeerLost
from elastic.runtime import Runtime


@dataclass
class _Claimed:
    """A name in use. ``works`` is None until the collective has been submitted."""

    name: str
    shown: str  # the same on all ranks: without a number that only this process gave it
    runtime: Runtime
    generation: int
    works: list[Work] | None = None
    finish: Callable[[], Any] | None = None

    def stale(self, rt: Runtime) -> bool:
        return self.runtime is not rt or self.generation != rt.generation


class Handles:
    """Thread-safe. What a world leaves behind when it breaks is dropped as soon as the next one claims a handle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._claimed: dict[int, _Claimed] = {}
        self._names: dict[str, int] = {}
        self._lost: set[int] = set()  # of worlds that are gone

    def claim(self, rt: Runtime, kind: str, name: str | None) -> int:
        """A handle for a collective that is about to be submitted. Raises Invalid if its name is in flight."""
        with self._lock:
            if any(claimed.stale(rt) for claimed in self._claimed.values()):
                self._drop_stale(rt)
            handle = next(self._numbers)
            full = f"{kind}.noname.{handle}" if name is None else f"{kind}.{name}"
            if full in self._names:
                raise Invalid(
                    f"{kind} {name!r} is in flight already; synchronize() its handle first, or use another name"
                )
            self._names[full] = handle
            shown = kind if name is None else full
            self._claimed[handle] = _Claimed(full, shown, rt, rt.generation)
            return handle

    def submitted(self, handle: int, works: list[Work], finish: Callable[[], Any]) -> None:
        with self._lock:
            claimed = self._claimed.get(handle)
            if claimed is not None:
                claimed.works, claimed.finish = works, finish

    def name(self, handle: int) -> str:
        """By which it is told of: ``allreduce.loss``, or ``allreduce`` if it has none. Empty if it is not in flight."""
        with self._lock:
            claimed = self._claimed.get(handle)
        return claimed.shown if claimed is not None else ""

    def release(self, handle: int) -> None:
        """The collective was not submitted after all, or its result was taken."""
        with self._lock:
            claimed = self._claimed.pop(handle, None)
            if claimed is not None:
                self._names.pop(claimed.name, None)

    def done(self, handle: int, rt: Runtime) -> bool:
        """Whether `synchronize` would return or raise at once. Raises Invalid for a handle that is not in flight."""
        with self._lock:
            claimed = self._claimed.get(handle)
            if claimed is None and handle not in self._lost:
                raise Invalid(f"handle {handle} was never given out, or was synchronized already")
        if claimed is None or claimed.stale(rt):
            return True
        return all(work.done() for work in claimed.works or [])

    def take(self, handle: int, rt: Runtime) -> tuple[list[Work], Callable[[], Any], str] | None:
        """Its works, what makes the result of them, and its name; None for a handle that is not in flight.

        The handle and its name are free again. Raises PeerLost if it belongs to a world that is gone.
        """
        with self._lock:
            claimed = self._claimed.get(handle)
            lost = handle in self._lost
        if lost or (claimed is not None and claimed.stale(rt)):
            self.release(handle)
            raise PeerLost(f"the world in which handle {handle} was submitted is gone")
        if claimed is None or claimed.works is None or claimed.finish is None:
            return None
        self.release(handle)
        return claimed.works, claimed.finish, claimed.shown

    def _drop_stale(self, rt: Runtime) -> None:
        for handle, claimed in list(self._claimed.items()):
            if claimed.stale(rt):
                del self._claimed[handle]
                self._names.pop(claimed.name, None)
                self._lost.add(handle)
