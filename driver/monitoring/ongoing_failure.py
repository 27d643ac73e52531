"""Whether a failure is still unfolding, so that one summary of its log lines can follow it. Pure.

Under load, the exceptions and exits that one fault causes are seconds apart: an interpreter that has loaded torch takes
that long to exit, and ranks are scheduled at different times.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic.driver import events
from elastic.driver.events import Action, Event
from elastic.protocol.messages import Worker


class OngoingFailure:
    """Follows the events and actions of one job."""

    def __init__(self) -> None:
        self._running: set[Worker] = set()
        self._broken = False  # no world has replaced the last one
        self._failed = False  # the job ends without success

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        match event:
            case events.WorkerExited(worker):
                self._running.discard(worker)
            case events.HostLost(host):
                self._running = {each for each in self._running if each.host != host}
            case _:
                pass
        for action in actions:
            match action:
                case events.StartWorker(worker):
                    self._running.add(worker)
                case events.BreakWorld():
                    self._broken = True
                case events.PublishWorld():
                    self._broken = False
                case events.EndJob(code):
                    self._failed = code != 0
                case _:
                    pass

    def lasts(self, ending: Collection[Worker]) -> bool:
        """Return whether more exceptions and exits are expected. ``ending``: workers that have reported theirs."""
        return self._failed or self._broken or not self._running.isdisjoint(ending)
