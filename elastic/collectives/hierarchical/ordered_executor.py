"""Runs collectives that are made of several steps, one after another, in a thread. Acts.

What a rank submits is carried out in the order of submission, so that the steps of one never mix with those of the
next: all ranks take them in one order. The thread ends when nothing has come for a moment, so that the end of the
process need not wait for it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from elastic.collectives import threads
from elastic.errors import CollectiveFailed

_LINGER_S = 0.05
_SLICE_S = 1.0  # how often who waits looks whether this is a forked child, where nobody carries out anything


class InOrder:
    """``wake`` ends the waits of what is being carried out; it is called by `stop`, and never blocks."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._name = name
        self._wake = wake
        self._changed = threading.Condition()
        # Its first is being carried out.
        self._queue: collections.deque[Ordered] = collections.deque()
        self._running = False
        self.failure: CollectiveFailed | None = None  # why nothing is carried out any more
        self.forgotten = False

    def submit(self, run: Callable[[], None]) -> Ordered:
        """Carried out after what was submitted before. Raises CollectiveFailed after `stop`."""
        if self.failure is not None:
            raise self.failure.again()
        work = Ordered(self, run)
        with self._changed:
            self._queue.append(work)
            if self._running:
                self._changed.notify_all()
            else:
                self._running = True
                threads.begin(self._name, self._work)
        return work

    def stop(self, failure: CollectiveFailed) -> None:
        """What has not ended fails with it; the first one counts. Any thread, takes no lock."""
        self.failure = self.failure or failure.again()
        self._wake()

    def drain(self, timeout_s: float) -> bool:
        """After `stop`: waits until nothing is being carried out. Whether that is so."""
        if self.forgotten:
            return True
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def close_in_forked_child(self, reason: str) -> None:
        """In a forked child: the thread stayed with the parent, and the lock may be taken for ever."""
        self.failure = CollectiveFailed(reason)
        self.forgotten = True

    def _work(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._carry_out(work)
        except threads.Ending:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _next(self) -> Ordered | None:
        """None: the thread ends."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue or self.failure), _LINGER_S)
            if self._queue:
                return self._queue[0]
            self._running = False
            self._changed.notify_all()
            return None

    def _carry_out(self, work: Ordered) -> None:
        try:
            if self.failure is not None:
                raise self.failure.again()
            work.run()
        except threads.Ending:
            raise
        # Whatever it is, it must reach who waits, here and on the other ranks.
        except BaseException as error:
            if not isinstance(error, CollectiveFailed):
                error = CollectiveFailed(f"{type(error).__name__}: {error}")
            self.stop(error)
            work.error = self.failure
        work.conclude()
        with self._changed:
            self._queue.popleft()


class Ordered:
    """One that was submitted, as a `Work`."""

    def __init__(self, order: InOrder, run: Callable[[], None]) -> None:
        self._order = order
        self._over = threading.Event()
        self.run = run
        self.error: CollectiveFailed | None = None

    def conclude(self) -> None:
        del self.run  # it holds tensors, and who waits may keep this object for long
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def within(self, timeout_s: float) -> bool:
        if not self._over.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error.again()
        return True

    def wait(self) -> None:
        while not self.within(_SLICE_S):
            if self._order.forgotten and self._order.failure is not None:
                raise self._order.failure.again()
