"""Executor that runs multi-step collectives one after another in a thread.

Work is executed in the order of submission, so the steps of two collectives are never interleaved, and all ranks
execute them in the same order. An idle thread ends quickly and therefore does not delay the exit of the process.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from elastic.collectives import threads_at_exit
from elastic.errors import CollectiveFailed

_LINGER_S = 0.05
# Interval in seconds at which waits check whether this process is a forked child, which has no executor thread.
_SLICE_S = 1.0


class OrderedExecutor:
    """Executor that runs works one after another in a thread.

    ``wake`` is a callback that ends the waits of the running work. `stop` calls it and never blocks.
    """

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._name = name
        self._wake = wake
        self._changed = threading.Condition()
        # works in the order of submission; the first one is being executed
        self._queue: collections.deque[OrderedWork] = collections.deque()
        self._running = False
        # error that has stopped the execution, or None
        self.failure: CollectiveFailed | None = None
        self.forgotten = False

    def submit(self, run: Callable[[], None]) -> OrderedWork:
        """Submit work, to be executed after all previously submitted work.

        Raises:
            CollectiveFailed: `stop` was called.
        """
        if self.failure is not None:
            raise self.failure.again()
        work = OrderedWork(self, run)
        with self._changed:
            self._queue.append(work)
            if self._running:
                self._changed.notify_all()
            else:
                self._running = True
                threads_at_exit.begin(self._name, self._work)
        return work

    def stop(self, failure: CollectiveFailed) -> None:
        """Fail all incomplete work with this error.

        Only the first call has an effect. Thread-safe, and takes no lock.
        """
        self.failure = self.failure or failure.again()
        self._wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait, after `stop`, until no work is running. Return False if work is still running at the deadline."""
        if self.forgotten:
            return True
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def close_in_forked_child(self, reason: str) -> None:
        """Disable the executor in a forked child, where the thread is missing and the lock may be held forever."""
        self.failure = CollectiveFailed(reason)
        self.forgotten = True

    def _work(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._carry_out(work)
        except threads_at_exit.ProcessExiting:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _next(self) -> OrderedWork | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue or self.failure), _LINGER_S)
            if self._queue:
                return self._queue[0]
            self._running = False
            self._changed.notify_all()
            return None

    def _carry_out(self, work: OrderedWork) -> None:
        try:
            if self.failure is not None:
                raise self.failure.again()
            work.run()
        except threads_at_exit.ProcessExiting:
            raise
        # Any exception must end the waits for this work, in threads of this process and on other ranks.
        except BaseException as error:
            if not isinstance(error, CollectiveFailed):
                error = CollectiveFailed(f"{type(error).__name__}: {error}")
            self.stop(error)
            work.error = self.failure
        work.conclude()
        with self._changed:
            self._queue.popleft()


class OrderedWork:
    """Work that was submitted to an `OrderedExecutor`, with the interface of `Work`."""

    def __init__(self, order: OrderedExecutor, run: Callable[[], None]) -> None:
        self._order = order
        self._over = threading.Event()
        self.run = run
        self.error: CollectiveFailed | None = None

    def conclude(self) -> None:
        del self.run  # The caller may keep this object, so its tensors are released.
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
