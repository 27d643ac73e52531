"""The seam under every discovery: lists of hosts and their slots as they change, and no policy.

A discovery knows nothing of min, max, cooldown or rank, and never decides to leave a host out for what it did.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

Log = Callable[[str, str], None]  # level ("info", "warning") and one line


class Discovery(Protocol):
    """Watches which hosts there are."""

    def watch(self) -> AsyncIterator[dict[str, int]]:
        """Yields the whole list ``{host: slots}``, in order of preference: first the present one, then at each change.

        Ends when the list can never change again. Never blocks the event loop, and never raises because a source
        fails: the last good list stays, and one line of warning is reported. Called once for each object.
        """
