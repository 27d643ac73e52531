"""Warning about a script that has read environment variables of an earlier world. Issued at most once."""

from __future__ import annotations

import os
import warnings

from elastic.errors import StaleValueWarning
from elastic.protocol.messages import Place
from elastic.rendezvous import rank_variables

_SHOWN = 3  # maximum number of script lines in the warning


class KeptVariables:
    """Environment variables as this worker started with them, for comparison with later worlds."""

    def __init__(self) -> None:
        self._at_start = dict(os.environ)
        self._looked = False

    def follow(self, place: Place, *, first: bool) -> None:
        """Update the environment variables for a new place in the world.

        On rank 0 of the first later world, emit a StaleValueWarning if the script reads a variable that has changed
        since this worker started.

        Args:
            place: place in the new world.
            first: whether this is the worker's first world.
        """
        rank_variables.follow(place)
        if first or self._looked or place.rank != 0:
            return
        self._looked = True
        stale = rank_variables.stale(place, self._at_start, rank_variables.reads_of_script())
        if stale:
            warnings.warn(self._text(place, stale), StaleValueWarning, stacklevel=1)

    def _text(self, place: Place, stale: list[rank_variables.VariableRead]) -> str:
        lines = [
            f"{os.path.basename(read.file)}:{read.line} {read.name}" for read in stale[:_SHOWN]
        ]
        more = f" and {len(stale) - _SHOWN} more" if len(stale) > _SHOWN else ""
        slot = (
            f" LOCAL_RANK is the number of the slot and stays {place.local_rank}, because it selects the GPU: a script"
            " that saves or prints only if LOCAL_RANK is 0 does neither while slot 0 has no worker."
            if any(read.name == rank_variables.SLOT for read in stale)
            else ""
        )
        return (
            f"the world changed: this worker is rank 0 of {place.size} now. The script reads environment variables"
            f" ({', '.join(lines)}{more}) that had other values when it started. os.environ has the current RANK and"
            f" WORLD_SIZE, but values that the script stored are not updated.{slot} Check dist.get_rank() == 0 or"
            " elastic.rank() == 0 whenever the script saves or prints, and use LOCAL_RANK for the device only"
        )
