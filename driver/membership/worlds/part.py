"""Base class of the parts of a membership. It holds the objects that they share. Makes no decisions."""

from __future__ import annotations

from elastic.driver.membership.worlds.worlds import Worlds


class Part:
    """Base class of a membership's parts. A part uses only the public names of the parts passed to it."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self.settings = worlds.settings
        self.actions = worlds.actions
        self.staff = worlds.staff
        self.roster = worlds.staff.roster
