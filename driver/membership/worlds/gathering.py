"""Decisions about a gathering, which is the phase between two worlds.

They determine which workers are awaited, for how long, and which workers can form a world.

Pure: no I/O, no clock.

A world of ``init()`` consists of workers outside elastic.run. Every other world consists of workers inside it. A
gathering waits for every old member, because each of them eventually becomes ready or exits. It does not wait for new
workers, which can join later.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic.driver.membership.records.roster import Roster, WorkerRecord, WorkerStage
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker

NAMED = 8  # maximum number of lost workers that the reason names
REMIND_S = 5.0  # seconds after which the workers that a gathering waits for are logged
# The same for a gathering of kind START. It is longer, because a script may import modules or build a model before it
# enters elastic.run.
START_REMIND_S = 30.0


class Kind(enum.Enum):
    # workers are calling init() or entering elastic.run; no training is interrupted
    START = "start"
    CHANGE = "change"  # all members have stopped at an agreed safepoint
    RECOVERY = "recovery"  # the world failed


@dataclass
class Gathering:
    """Phase between two worlds. Fields ending in ``_by`` or ``_at`` are times in seconds on the caller's clock."""

    kind: Kind
    reason: Reason
    began_at: float
    settings: Settings
    had_loss: bool = False
    # Whether ``late_at`` has passed. Members of the last world that are outside elastic.run are then no longer awaited.
    late: bool = False
    # No worker holds a commit, so all workers begin from a checkpoint or from the initial state, and every starting
    # worker is awaited.
    anew: bool = False
    # The whole job restarts outside elastic.run. Workers that are not running yet are also awaited, because they cannot
    # join later.
    whole: bool = False
    # Deadline for enough workers to become ready. Set while too few are ready and no worker is awaited.
    short_by: float | None = None
    # shortage that was last logged: numbers of ready workers, needed workers and queued hosts
    said: tuple[int, int, int] | None = None
    _more: int = 0  # number of lost workers that are not named in the reason
    # seconds after began_at at which the awaited workers are logged again; 0 means the default for the kind of
    # gathering
    remind_after_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.remind_after_s:  # not restored from a snapshot
            self._remind_as_first()

    @property
    def remind_at(self) -> float:
        return self.began_at + self.remind_after_s

    def reminder(self, awaited: Sequence[WorkerRecord], now: float) -> str:
        """Return a sentence that names the awaited workers and the deadline."""
        names = ", ".join(str(s.worker) for s in awaited[:4])
        more = f" and {len(awaited) - 4} more" if len(awaited) > 4 else ""
        first, one = awaited[0], len(awaited) == 1
        have = "has" if one else "have"
        what = (
            f"{have} not returned from {'its' if one else 'their'} step"
            if first.running
            else f"{have} neither entered elastic.run nor called init() again"
        )
        end = f"the others continue without {'it' if one else 'them'}"
        if first.running:
            end = "it is killed" if one else "they are killed"
        if not self.settings.elastic:
            end = "the job ends"
        left = max(0.0, self.late_at - now)
        return (
            f"{names}{more} {what} for {now - self.began_at:.0f} s;"
            f" {end} in {left:.0f} s at the latest (--elastic-timeout)"
        )

    @property
    def late_at(self) -> float:
        """Deadline for members of the last world to become ready."""
        return self.began_at + self.settings.elastic_timeout_s

    def begin_again(self, now: float) -> None:
        """Restart all deadlines at ``now``, because no worker could become ready before."""
        if self.short_by is not None:
            self.short_by += now - self.began_at
        self.began_at = now
        self._remind_as_first()

    def _remind_as_first(self) -> None:
        self.remind_after_s = START_REMIND_S if self.kind is Kind.START else REMIND_S

    def lost(self, reason: Reason) -> None:
        """Record that a worker was lost. The loss replaces earlier reports of failed collectives as the reason."""
        if not self.had_loss:
            self.had_loss, self.reason = True, reason
            return
        known = self.reason.facts.get("causes")
        causes = known if isinstance(known, list) else [self.reason]
        if len(causes) < NAMED:
            causes = [*causes, reason]
        else:
            # The reason is sent to every member, so its size must not grow with the number of lost workers.
            self._more += 1
        self.reason = because(ReasonKind.SEVERAL, causes=causes, more=self._more)

    def awaited(self, roster: Roster) -> Iterator[WorkerRecord]:
        """Yield the workers for which the gathering must wait."""
        for record in self.missing(roster):
            if record.running or not self.late:
                yield record

    def missing(self, roster: Roster) -> Iterator[WorkerRecord]:
        """Yield the members of the last world that are not ready yet."""
        return roster.first_at(WorkerStage.MEMBER, WorkerStage.RETURNED)


def candidates(
    ready: Sequence[WorkerRecord], members: Sequence[Worker]
) -> tuple[list[WorkerRecord], list[WorkerRecord], list[WorkerRecord]]:
    """Classify ready workers into three lists.

    Returns:
        Three lists: members of the last world in rank order, newcomers, and workers that need the other kind of world
        (of init() or of elastic.run).
    """
    of = {s.worker: s for s in ready}
    old = [s for s in map(of.get, members) if s is not None]
    new: list[WorkerRecord] = []
    if len(old) < len(ready):
        known = set(members)
        new = [s for s in ready if s.worker not in known]
    running = any(s.running for s in old or new)
    others = [s for s in ready if s.running is not running]
    if not others:
        if members and not running:
            return old, [], new
        return old, new, []
    if members and not running:
        # A newcomer cannot join a world of init(). It waits until the members enter elastic.run.
        others, new = [*others, *new], []
    return (
        [s for s in old if s.running is running],
        [s for s in new if s.running is running],
        others,
    )
