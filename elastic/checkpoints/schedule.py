"""Choice of the commits that a rank writes to storage. Pure: no I/O, no clock.

All ranks must choose the same commit without waiting for each other. Rank 0 decides: it requests a commit that is far
enough ahead for the request to reach all ranks before they make that commit. If a rank receives the request too late,
it reports this; then no rank writes the commit, and rank 0 requests a later one. Rank 0 requests no commit while one is
being written. (If each rank chose independently, a rank that is still writing would skip a commit that the other ranks
write. With slow storage, no checkpoint would ever be complete.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.protocol.messages import Commit

LEAD_S = 0.05  # time in which rank 0's request usually reaches all ranks
# If commits are at least this many seconds apart, rank 0 may request the very next commit.
SLOW_S = 1.0
FURTHEST = 512  # maximum lead, in units of LEAD_S
# After this time plus three leads, rank 0 repeats its request: the driver may have been replaced, or commits may have
# become slower than when the lead was computed.
UNANSWERED_S = 2.0


@dataclass(frozen=True)
class Step:
    """Actions of a rank after a commit.

    Args:
        begin: number of the request for which this commit is written, or None.
        ask: number of the commit that rank 0 requests, or None.
    """

    begin: int | None = None
    ask: int | None = None


class Schedule:
    """Schedule of the commits that one rank writes.

    ``at_commit`` is called by the training thread, all other methods by the link thread. No lock is needed, because
    `request` stores a number before it checks whether the number is already past.
    """

    def __init__(self, every_commits: int | None, every_s: float | None, now: float) -> None:
        self._every_commits = every_commits
        self._every_s = every_s
        self._due_at = math.inf if every_s is None else now + every_s
        self._generation = 0
        self._newest = 0
        self._target: int | None = None
        self._next = False  # whether the script has requested a checkpoint of the next commit
        self._wanted: int | None = None  # number of the commit that the script has requested
        # number of the scheduled commit whose write has begun and is not known to be durable yet
        self._owed: int | None = None
        # Number and time of the unanswered request of rank 0.
        self._asked: tuple[int, float] | None = None
        self._stretch = 1  # current lead, in units of LEAD_S
        self._last_at: float | None = None
        self._interval_s = 0.0  # smoothed time between two commits, in seconds

    def wanted(self) -> None:
        """Request a checkpoint of the next commit.

        The script calls this on every rank, so no message is needed.
        """
        self._next = True

    def hasten(self, now: float) -> None:
        """Request a checkpoint of one of the next commits, even if none is due."""
        self._due_at = min(self._due_at, now)

    @property
    def target(self) -> int | None:
        """Return the number of the last requested commit, or None if no request is pending."""
        return self._target

    def request(self, generation: int, number: int) -> bool:
        """Schedule a checkpoint of the first commit whose number is at least ``number``.

        Return False if the request is too late, because this rank has already made that commit.
        """
        if generation != self._generation:
            return False
        self._target = number
        if self._newest < number:
            return True
        self._target = None
        return False

    def at_commit(self, commit: Commit, now: float, *, leads: bool, busy: bool) -> Step:
        """Return what this rank must do after a commit: begin a write, send a request, or neither.

        Args:
            commit: the commit that was just made.
            now: current time, in seconds.
            leads: whether this is rank 0.
            busy: whether an earlier commit is still being written.
        """
        if commit.generation != self._generation:
            self._generation, self._target, self._asked = commit.generation, None, None
            if self._owed is not None:  # A write that began in an earlier world is never completed.
                self._due_at, self._owed = min(self._due_at, now), None
        self._newest = commit.number
        self._pace(now)
        wanted, self._next = self._next, False
        target = self._target
        if target is not None and commit.number >= target:
            self._target = self._asked = None
            self._began(target, now)
            return Step(begin=target)
        if wanted:
            self._wanted = self._owed = commit.number
            return Step(begin=commit.number)
        due = now >= self._due_at
        if not leads or busy or not self._interval_s or not (due or self._every_commits):
            return Step()
        patience = UNANSWERED_S + 3 * LEAD_S * self._stretch
        if self._asked is not None and now - self._asked[1] < patience:
            return Step()
        ahead = math.ceil(LEAD_S * self._stretch / max(self._interval_s, 1e-4))
        lead = min(ahead + (self._interval_s < SLOW_S), 10_000)
        ask = commit.number + lead
        if not due and self._every_commits:
            ask = -(-ask // self._every_commits) * self._every_commits
            if ask > commit.number + 2 * lead:
                return Step()  # Request the commit again when its number is closer.
        self._asked = ask, now
        return Step(ask=ask)

    def dropped(self, number: int, now: float, *, again: bool) -> None:
        """Cancel a request, because a rank could not write the commit.

        If ``again`` is true, that rank received the request too late, and a later commit is requested instead.
        """
        if number == self._owed and (again or number == self._wanted):
            self._due_at = now  # A checkpoint of one of the next commits is due instead.
        self.settled(number)
        # Another commit may have been requested in the meantime.
        if self._target == number:
            self._target = None
        if self._asked is not None and self._asked[0] == number:
            self._asked = None
        if again:
            self._stretch = min(self._stretch * 2, FURTHEST)

    def written(self) -> None:
        """Reduce the lead of rank 0's requests after a checkpoint was written successfully.

        This method is called on rank 0.
        """
        self._stretch = max(self._stretch // 2, 1)

    def settled(self, number: int) -> None:
        """Record that a request's outcome is known, so that rank 0 may make another request."""
        if number == self._owed:
            self._owed = None

    def _began(self, number: int, now: float) -> None:
        self._owed = number if self._due_at <= now else None
        if self._every_s is not None:
            self._due_at = now + self._every_s
        elif self._due_at <= now:
            self._due_at = math.inf

    def _pace(self, now: float) -> None:
        if self._last_at is not None:
            took_s = now - self._last_at
            self._interval_s += (took_s - self._interval_s) * (0.2 if self._interval_s else 1.0)
        self._last_at = now
