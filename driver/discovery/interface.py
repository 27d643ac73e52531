"""Interface of all discoveries. A discovery yields the list of hosts and slots after each change. Makes no decisions.

A discovery is independent of limits, cooldowns and ranks, and never omits a host because of failures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

# log function, called with a level ("info", "warning") and one line
Log = Callable[[str, str], None]


@dataclass(frozen=True)
class ResourceDemand:
    """Demand of a job for machines, for providers that supply machines on request.

    Attributes:
        most: maximum number of workers, including standbys.
        used: for each host, the number of slots up to the last one with a worker.
        drained: hosts that an operator has drained. Their slots do not count towards ``most``.
    """

    most: int
    used: Mapping[str, int] = field(default_factory=dict)
    drained: Collection[str] = ()


class Discovery(Protocol):
    """Interface of a source of hosts."""

    def watch(self) -> AsyncIterator[dict[str, int]]:
        """Yield complete lists ``{host: slots}`` in order of preference.

        The first list is the current one, and each change follows.

        The iterator ends when the list can no longer change. It must not block the event loop. If the source fails, the
        last valid list is kept, and one warning is logged. This method is called once per object.
        """
