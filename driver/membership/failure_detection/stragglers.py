"""Detection of stragglers: workers that never wait while all others wait for them. Pure: no I/O, no clock.

Every worker regularly reports the share of its time that it spends in collectives. In a balanced world, all workers
wait about equally little. If one worker is slow, all others wait for it, and it never waits itself. Stragglers are only
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.protocol.messages import Worker

LITTLE = 0.1  # share of time: a worker that waits less is a straggler ...
MUCH = 0.5  # ... if the median of the others waits more


@dataclass
class Stragglers:
    """Stragglers of one generation. The cost of a report does not depend on the number of members."""

    size: int = 0  # members of the world
    named: frozenset[Worker] = frozenset()  # stragglers as of the last report
    _share: dict[Worker, float] = field(default_factory=dict)
    _little: set[Worker] = field(default_factory=set)
    _much: set[Worker] = field(default_factory=set)

    def paced(self, worker: Worker, waited_s: float, over_s: float) -> bool:
        """Record one worker's last report. Return whether ``named`` has changed."""
        if over_s <= 0 or self.size < 2:
            return False
        share = min(1.0, waited_s / over_s)
        self._share[worker] = share
        for group, belongs in ((self._little, share < LITTLE), (self._much, share > MUCH)):
            (group.add if belongs else group.discard)(worker)
        found: frozenset[Worker] = frozenset()
        others = len(self._share) - 1  # compared with the workers that wait little
        if self._little and 2 * others >= self.size - 1 and 2 * len(self._much) > others:
            found = frozenset(self._little)
        before, self.named = self.named, found
        return found != before

    def sentence(self, name: Callable[[Worker], str]) -> str:
        """Return the current stragglers as a sentence."""
        slow = sorted(self.named)
        if not slow:
            return "no straggler any more"
        shares = sorted(share for worker, share in self._share.items() if worker not in self.named)
        median = shares[len(shares) // 2]
        names = ", ".join(f"{name(w)}, which waits {self._share[w]:.0%}" for w in slow[:4])
        more = f", and {len(slow) - 4} more" if len(slow) > 4 else ""
        verb = "hold" if len(slow) > 1 else "holds"
        return (
            f"{names}{more}, {verb} the others up, which wait {median:.0%} of their time in collectives: slow"
            " hardware, or uneven work?"
        )
