"""Base class of the parts of a membership, with the objects that they share. Decides nothing."""

from __future__ import annotations

from elastic.driver.membership.worlds.worlds import Worlds


class Part:
    """One part of a membership. It uses other parts only if they are passed to it, by their public names."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self.settings = worlds.settings
        self.actions = worlds.actions
        self.staff = worlds.staff
        self.roster = worlds.staff.roster
