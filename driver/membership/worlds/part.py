"""Base class of the parts of a membership, with the objects that they share. Makes no decisions."""

from __future__ import annotations

from elastic.driver.membership.worlds.worlds import Worlds


class Part:
    """Base class of the parts of a membership. A part uses only public names of other parts."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self.settings = worlds.settings
        self.actions = worlds.actions
        self.staff = worlds.staff
        self.roster = worlds.staff.roster
