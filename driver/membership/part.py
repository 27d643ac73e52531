"""Base of the parts of a membership: the worlds, and the objects that they share. Decides nothing."""

from __future__ import annotations

from elastic.driver.membership.worlds.worlds import Worlds


class Part:
    """Has its own fields. Of the other parts it knows those that it was given, by their public names."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self.settings = worlds.settings
        self.actions = worlds.actions
        self.staff = worlds.staff
        self.roster = worlds.staff.roster
