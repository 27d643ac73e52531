"""What has been decided about the event at hand, in order, and when it happened. Decides nothing."""

from __future__ import annotations

from elastic.driver.events import Action, Report
from elastic.driver.reasons import Reason


class Orders:
    """Shared by those that decide together. ``now`` is the time of the event, in seconds on the caller's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actions: list[Action] = []

    def begin(self, now: float) -> None:
        self.now, self.actions = now, []

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def say(self, level: str, text: str, about: Reason | None = None) -> None:
        self.do(Report(level, text, about))

    def due(self, deadline: float | None) -> bool:
        return deadline is not None and deadline <= self.now
