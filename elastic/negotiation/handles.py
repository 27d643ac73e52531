"""Handles: integers that identify in-flight collectives, from submission to `synchronize`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from elastic.context import Context
from elastic.errors import DuplicateName, Invalid, PeerLost
from elastic.negotiation.messages import Members
from elastic.negotiation.pending import Pending


class HandleEntry:
    """In-flight collective that a handle identifies.

    Thousands may be in flight, so the object is small and has no closures, which keeps garbage collection cheap.
    """

    __slots__ = ("generation", "pending", "pick", "runtime", "shown")

    def __init__(
        self, rt: Context, pending: Pending, pick: Callable[[Any], Any] | None, shown: str
    ) -> None:
        self.runtime = rt
        self.generation = rt.generation
        self.pending = pending
        self.pick = pick  # converts the raw result to the result that the user receives
        # name without the counter that this process appends to unnamed collectives, so that it is equal on all ranks
        self.shown = shown

    def stale(self, rt: Context) -> bool:
        return self.runtime is not rt or self.generation != rt.generation


class Handles:
    """Table of this process's handles. Thread-safe.

    Handles of a failed world become invalid when the first handle is claimed in the next world.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._claimed: dict[int, HandleEntry] = {}
        self._names: dict[tuple[Members, str], int] = {}
        self._lost: set[int] = set()  # handles claimed in earlier worlds
        # world in which the handles in `_claimed` were claimed
        self._world: tuple[Context, int] | None = None

    def claim(self, rt: Context, pending: Pending, pick: Callable[[Any], Any] | None) -> int:
        """Return a handle for a collective that is about to be submitted.

        Raises:
            DuplicateName: a collective with this name is already in flight.
        """
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
                        f"{name} is already in flight: synchronize() its handle first, or use another name"
                    )
                self._names[full] = handle
            self._claimed[handle] = HandleEntry(rt, pending, pick, name or pending.kind)
            return handle

    def name(self, handle: int) -> str:
        """Return the name of a handle's collective for messages, such as ``allreduce.loss``; ``allreduce`` if unnamed.

        The name of an unnamed collective is its kind, such as ``allreduce``. Return an empty string if the collective
        is not in flight.
        """
        claimed = self._claimed.get(handle)
        return claimed.shown if claimed is not None else ""

    def release(self, handle: int) -> None:
        """Free a handle and its name, after its result was taken or if the collective was not submitted."""
        with self._lock:
            claimed = self._claimed.pop(handle, None)
            if claimed is not None:
                self._unname(handle, claimed)

    def _unname(self, handle: int, claimed: HandleEntry) -> None:
        # Use the name that was claimed: the engine may since have assigned another one to the collective.
        full = claimed.pending.members, claimed.shown
        if self._names.get(full) == handle:
            del self._names[full]

    def done(self, handle: int, rt: Context) -> bool:
        """Return whether `synchronize` would return or raise immediately.

        Raises:
            Invalid: the handle is not in flight.
        """
        with self._lock:
            claimed = self._claimed.get(handle)
            if claimed is None and handle not in self._lost:
                raise Invalid(
                    f"handle {handle} does not exist, or was already synchronized: call synchronize() once per handle"
                )
        return claimed is None or claimed.stale(rt) or claimed.pending.done()

    def find(self, handle: int, rt: Context) -> HandleEntry | None:
        """Return the in-flight collective of this handle, or None. Call `release` after taking its result.

        Raises PeerLost if the handle belongs to an earlier world.
        """
        with self._lock:
            claimed = self._claimed.get(handle)
        if handle in self._lost or (claimed is not None and claimed.stale(rt)):
            self.release(handle)
            raise PeerLost(
                f"the world has changed since handle {handle} was created, so its result is lost: call the collective"
                " again in the new world"
            )
        return claimed

    def peek(self, handle: int) -> HandleEntry | None:
        """Return the collective of a handle from any world, or None. This method releases nothing."""
        return self._claimed.get(handle)

    def _drop_stale(self, rt: Context) -> None:
        for handle, claimed in list(self._claimed.items()):
            if claimed.stale(rt):
                del self._claimed[handle]
                self._unname(handle, claimed)
                self._lost.add(handle)
