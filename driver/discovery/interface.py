"""Interface of all discoveries, which yield the list of hosts and slots after each change. Makes no decisions.

A discovery does not depend on limits, cooldowns or ranks, and never omits a host because of failures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

# log function, called with a level ("info", "warning") and one line
Log = Callable[[str, str], None]


@dataclass(frozen=True)
class ResourceDemand:
    """Resources that a job requests from a provider of machines.

    Attributes:
        most: maximum number of workers, including standbys.
        used: for each host, the number of slots up to and including the last slot with a worker.
        drained: hosts that an operator has drained. Their slots do not count towards ``most``.
    """

    most: int
    used: Mapping[str, int] = field(default_factory=dict)
    drained: Collection[str] = ()


class Discovery(Protocol):
    """Interface of a source of hosts."""

    def watch(self) -> AsyncIterator[dict[str, int]]:
        """Yield the current list of hosts, then the complete list after each change.

        A list is ``{host: slots}``, in order of preference. The iterator ends when the list can no longer change, and
        must not block the event loop. If the source fails, the last valid list is kept and one warning is logged. This
        method is called once per object.
        """
