"""The seam under every discovery: lists of hosts and their slots as they change, and no policy.

A discovery knows nothing of min, max, cooldown or rank, and never decides to leave a host out for what it did.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Log = Callable[[str, str], None]  # level ("info", "warning") and one line


@dataclass(frozen=True)
class Need:
    """What a job can use now, for those who supply machines as they are needed.

    ``most``: workers, with standbys. ``used``: of each host the slots up to the last that has a worker. ``drained``:
    hosts that an operator wants empty; what they have comes on top of ``most``.
    """

    most: int
    used: Mapping[str, int] = field(default_factory=dict)
    drained: Collection[str] = ()


class Discovery(Protocol):
    """Watches which hosts there are."""

    def watch(self) -> AsyncIterator[dict[str, int]]:
        """Yields the whole list ``{host: slots}``, in order of preference: first the present one, then at each change.

        Ends when the list can never change again. Never blocks the event loop, and never raises because a source
        fails: the last good list stays, and one line of warning is reported. Called once for each object.
        """
