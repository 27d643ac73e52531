"""Handles: the integers that stand for collectives under way, from submission to `synchronize`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from elastic.context import Context
from elastic.errors import DuplicateName, Invalid, PeerLost
from elastic.negotiation.messages import Members
from elastic.negotiation.pending import Pending


class Claimed:
    """A handle in use. Few plain objects: thousands may be in flight, and each costs the garbage collector."""

    __slots__ = ("generation", "pending", "pick", "runtime", "shown")

    def __init__(
        self, rt: Context, pending: Pending, pick: Callable[[Any], Any] | None, shown: str
    ) -> None:
        self.runtime = rt
        self.generation = rt.generation
        self.pending = pending
        self.pick = pick  # makes the result that the user sees
        self.shown = shown  # the same on all ranks: without a number that only this process gave it

    def stale(self, rt: Context) -> bool:
        return self.runtime is not rt or self.generation != rt.generation


class Handles:
    """Thread-safe. What a world leaves behind when it breaks is dropped as soon as the next one claims a handle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._claimed: dict[int, Claimed] = {}
        self._names: dict[tuple[Members, str], int] = {}
        self._lost: set[int] = set()  # of worlds that are gone
        self._world: tuple[Context, int] | None = None  # whose handles these are

    def claim(self, rt: Context, pending: Pending, pick: Callable[[Any], Any] | None) -> int:
        """A handle for a collective that is about to be submitted. Raises DuplicateName if its name is in flight."""
        name = pending.name
        with self._lock:
            if self._world is None or self._world[0] is not rt or self._world[1] != rt.generation:
                self._drop_stale(rt)
                self._world = rt, rt.generation
            handle = next(self._numbers)
            if name:
                full = pending.members, name
                before = self._names.get(full)
                if before is not None and not self._claimed[before].pending.done():
                    raise DuplicateName(
                        f"{name} is already in flight: synchronize() its handle first, or use another name (no"
                        " duplicates)"
                    )
                self._names[full] = handle
            self._claimed[handle] = Claimed(rt, pending, pick, name or pending.kind)
            return handle

    def name(self, handle: int) -> str:
        """By which it is told of: ``allreduce.loss``, or ``allreduce`` if it has none. Empty if it is not in flight."""
        claimed = self._claimed.get(handle)
        return claimed.shown if claimed is not None else ""

    def release(self, handle: int) -> None:
        """The collective was not submitted after all, or its result was taken: handle and name are free again."""
        with self._lock:
            claimed = self._claimed.pop(handle, None)
            if claimed is not None:
                self._unname(handle, claimed)

    def _unname(self, handle: int, claimed: Claimed) -> None:
        # By the name that was claimed: the engine may have given it one since.
        full = claimed.pending.members, claimed.shown
        if self._names.get(full) == handle:
            del self._names[full]

    def done(self, handle: int, rt: Context) -> bool:
        """Whether `synchronize` would return or raise at once. Raises Invalid for a handle that is not in flight."""
        with self._lock:
            claimed = self._claimed.get(handle)
            if claimed is None and handle not in self._lost:
                raise Invalid(f"handle {handle} does not exist, or was already synchronized")
        return claimed is None or claimed.stale(rt) or claimed.pending.done()

    def find(self, handle: int, rt: Context) -> Claimed | None:
        """What is in flight under this handle; None if nothing is. `release` it when its result was taken.

        Raises PeerLost if it belongs to a world that is gone.
        """
        with self._lock:
            claimed = self._claimed.get(handle)
        if handle in self._lost or (claimed is not None and claimed.stale(rt)):
            self.release(handle)
            raise PeerLost(f"the world in which handle {handle} was submitted is gone")
        return claimed

    def peek(self, handle: int) -> Claimed | None:
        """As `find`, but of whatever world; releases nothing."""
        return self._claimed.get(handle)

    def _drop_stale(self, rt: Context) -> None:
        for handle, claimed in list(self._claimed.items()):
            if claimed.stale(rt):
                del self._claimed[handle]
                self._unname(handle, claimed)
                self._lost.add(handle)
