"""Decides which commits a rank writes to the storage. Pure.

All ranks must choose the same one, and none may wait for another. Rank 0 decides, and names a commit far enough ahead
that all hear of it before they make it; whoever hears of it too late says so, nobody writes it, and the next one is
named further ahead. Rank 0 names none while one is being written. (Where each rank counted commits for itself, those
that still wrote would leave one out, and others the next: with slow storage none was ever whole.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.protocol.messages import Commit

LEAD_S = 0.05  # in which the word of rank 0 has come to all, unless something is slow
SLOW_S = 1.0  # between commits: then the very next one may be named
FURTHEST = 512  # times LEAD_S
UNANSWERED_S = 2.0  # after that, and several times the lead, rank 0 asks again: the driver may have been replaced, or
# commits come more slowly than those from which the number was reckoned


@dataclass(frozen=True)
class Step:
    """What a commit leads to. ``begin``: the request that it meets; ``ask``: rank 0 asks for this number."""

    begin: int | None = None
    ask: int | None = None


class Schedule:
    """One rank's. ``at_commit`` is for the training thread, all others for the link thread; no lock is needed, because
    a number is noted by `told` before it looks whether it came too late.
    """

    def __init__(self, every_commits: int | None, every_s: float | None, now: float) -> None:
        self._every_commits = every_commits
        self._every_s = every_s
        self._due_at = math.inf if every_s is None else now + every_s
        self._generation = 0
        self._newest = 0
        self._target: int | None = None
        self._next = False  # the script wants the next commit
        self._wanted: int | None = None  # the script wanted this one
        self._owed: int | None = None  # one that was due was begun, and is not known to be durable
        # By rank 0, which has had no answer: for what, and when.
        self._asked: tuple[int, float] | None = None
        self._stretch = 1  # how many times LEAD_S the next one is named ahead
        self._last_at: float | None = None
        self._interval_s = 0.0  # between two commits, smoothed

    def wanted(self) -> None:
        """The script asks for the next commit, on all ranks alike: nobody has to be told."""
        self._next = True

    def hasten(self, now: float) -> None:
        """One of the next commits is to be written, whatever the interval."""
        self._due_at = min(self._due_at, now)

    @property
    def target(self) -> int | None:
        """The request that is waited for."""
        return self._target

    def told(self, generation: int, number: int) -> bool:
        """The first commit from ``number`` on is to be written. False: one was made already, so it is too late."""
        if generation != self._generation:
            return False
        self._target = number
        if self._newest < number:
            return True
        self._target = None
        return False

    def at_commit(self, commit: Commit, now: float, *, leads: bool, busy: bool) -> Step:
        """This one was just made. ``leads``: by rank 0. ``busy``: one before it is still being written."""
        if commit.generation != self._generation:
            self._generation, self._target, self._asked = commit.generation, None, None
            if self._owed is not None:  # whatever was begun in another world stays undone
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
                return Step()  # soon enough when it is nearer
        self._asked = ask, now
        return Step(ask=ask)

    def dropped(self, number: int, now: float, *, again: bool) -> None:
        """What was asked for will not be written: somebody could not, or, ``again``, it only came at the wrong time."""
        if number == self._owed and (again or number == self._wanted):
            self._due_at = now  # then one of the next, when that can be
        self.settled(number)
        # Another one may have been asked for since.
        if self._target == number:
            self._target = None
        if self._asked is not None and self._asked[0] == number:
            self._asked = None
        if again:
            self._stretch = min(self._stretch * 2, FURTHEST)

    def written(self) -> None:
        """What was asked for is in the storage, as rank 0 knows first."""
        self._stretch = max(self._stretch // 2, 1)

    def settled(self, number: int) -> None:
        """It is known what has become of this request."""
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
