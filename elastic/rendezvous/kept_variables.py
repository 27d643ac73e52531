"""Tells a script, once, that it reads variables of the environment that were another world's. Acts."""

from __future__ import annotations

import os
import warnings

from elastic.errors import StaleValueWarning
from elastic.protocol.messages import Place
from elastic.rendezvous import place_variables

_SHOWN = 3  # lines of a script


class KeptVariables:
    """``at_start``: the environment as this worker was started with it, before `follow` changed it."""

    def __init__(self) -> None:
        self._at_start = dict(os.environ)
        self._looked = False

    def follow(self, place: Place, *, first: bool) -> None:
        """The worker is at ``place`` now. On rank 0, the first time that this is another world than its first one,
        emits a StaleValueWarning if the script reads a variable whose value at the start has become wrong.
        """
        place_variables.follow(place)
        if first or self._looked or place.rank != 0:
            return
        self._looked = True
        stale = place_variables.stale(place, self._at_start, place_variables.reads_of_script())
        if stale:
            warnings.warn(self._text(place, stale), StaleValueWarning, stacklevel=1)

    def _text(self, place: Place, stale: list[place_variables.Read]) -> str:
        lines = [
            f"{os.path.basename(read.file)}:{read.line} {read.name}" for read in stale[:_SHOWN]
        ]
        more = f" and {len(stale) - _SHOWN} more" if len(stale) > _SHOWN else ""
        slot = (
            f" LOCAL_RANK is the slot, and stays {place.local_rank}, because it picks the GPU: a script that saves"
            " or prints where it is 0 does neither while that slot is lost."
            if any(read.name == place_variables.SLOT for read in stale)
            else ""
        )
        return (
            f"the world has changed: this worker is rank 0 of {place.size} now. The script reads variables of the"
            f" environment ({', '.join(lines)}{more}) that were others when it started. os.environ has the present"
            f" RANK and WORLD_SIZE; a value that was kept does not follow.{slot} Ask dist.get_rank() == 0 or"
            " elastic.rank() == 0 each time that the script saves or prints, and use LOCAL_RANK for the device only"
        )
