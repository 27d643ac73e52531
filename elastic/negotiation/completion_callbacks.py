"""Completion callbacks of collectives, for callers that must not block for long.

One background thread waits for all collectives. If no other collective is in flight, a caller first waits briefly in
its own thread: if the other ranks are about to submit the same collective, switching threads would take longer than the
collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic.negotiation import submission

BRIEF_S = 0.003  # time in seconds that a caller waits before the background thread takes over

Finish = Callable[[], None]


class Completions:
    """Completion callbacks of collectives in flight. Thread-safe.

    The background thread starts when it is first needed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, Finish] = {}
        self._added = False  # whether a collective was added since the thread last checked
        self._idle = True
        self._brief = threading.Lock()  # lock that a caller holds while it waits in its own thread
        self._thread: threading.Thread | None = None

    def when_over(self, handle: int, finish: Finish) -> None:
        """Call ``finish`` once the collective is complete or about to complete.

        ``finish`` is called in this thread or in the waiting thread. It calls `submission.synchronize` and must not
        raise. Completions are detected in any order, so a collective that another rank delays does not delay later
        collectives.
        """
        if submission.over(handle) or self._ends_soon(handle):
            finish()
            return
        with self._changed:
            self._waiting[handle] = finish
            self._added = True
            idle = self._idle
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="elastic-completions", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        if not idle:
            submission.offer(handle)

    def _ends_soon(self, handle: int) -> bool:
        if self._waiting or not self._brief.acquire(blocking=False):
            return False
        try:
            until = time.monotonic() + BRIEF_S
            return bool(submission.wait_for_any([handle], lambda: False, until))
        finally:
            self._brief.release()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle = not self._waiting
                while not self._waiting:
                    self._changed.wait()
                self._idle = self._added = False
                handles = list(self._waiting)
            over = [handle for handle in handles if submission.over(handle)]
            if not over:
                over = submission.wait_for_any(handles, lambda: self._added)
            for handle in over:
                with self._changed:
                    finish = self._waiting.pop(handle)
                finish()
                del finish
