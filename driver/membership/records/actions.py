"""Ordered list of the actions that the current event causes, and the time of the event. Makes no decisions."""

from __future__ import annotations

from elastic.driver.events import Action, Report
from elastic.driver.reasons import Reason


class ActionList:
    """List of actions to which all parts of a membership append.

    Args:
        now: time of the event, in seconds on the caller's clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.decided: list[Action] = []

    def begin(self, now: float) -> None:
        self.now, self.decided = now, []

    def add(self, action: Action) -> None:
        self.decided.append(action)

    def log(self, level: str, text: str, about: Reason | None = None) -> None:
        self.add(Report(level, text, about))

    def expired(self, deadline: float | None) -> bool:
        return deadline is not None and deadline <= self.now
