"""Membership that runs all checks after every event, to compare with one that omits some."""

from __future__ import annotations

from elastic.driver.events import Event
from elastic.driver.membership.membership import Membership


class CheckingAll(Membership):
    def _is_one_of_many(self, event: Event, now: float) -> bool:
        return False
