"""State of the last published world, including the reports of its members and their state digests.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.driver.events import (
    Member,
    ReportRecovery,
    ShardsDivided,
    WorkerDigested,
    WorkerResumed,
    WorkersResumed,
)
from elastic.driver.membership.records.roster import Roster, WorkerStage
from elastic.driver.membership.scheduling import rank_order
from elastic.driver.membership.worlds.gathering import Kind
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.protocol.messages import Commit, Place, Worker, total_rows

DIGESTS = 64  # maximum number of commits for which a digest is stored


@dataclass
class World:
    """World that was published last.

    ``members`` are in rank order and include dead members. In generation 0, no world has been published yet.
    """

    generation: int = 0
    members: list[Worker] = field(default_factory=list)
    # whether the members are inside elastic.run; otherwise, this is a world of init()
    running: bool = False
    commit: Commit | None = None  # newest commit that a member held when the world began
    layout: str = ""
    kind: Kind = Kind.START
    reason: Reason = field(default_factory=lambda: because(ReasonKind.FIRST_START))
    cause_at: float = 0.0
    published_at: float = 0.0
    trained: bool = False  # whether a member has resumed in this or an earlier world
    # number of the first repeated step, if the world begins from an older commit than the newest
    back_to: int | None = None
    places: dict[Worker, Place] = field(init=False)
    # Reports of the members that resumed. The values are None after all have resumed, to keep snapshots small.
    _resumed: dict[Worker, WorkerResumed | WorkersResumed | None] = field(default_factory=dict)
    _digests: dict[Commit, tuple[Worker, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = dict(zip(self.members, rank_order.places(self.members), strict=True))

    def placed(self) -> list[Member]:
        return [*map(Member, self.places.keys(), self.places.values())]

    def resumed(self, event: WorkerResumed, now: float) -> ReportRecovery | None:
        """Record that a member resumed. Return the recovery report if all members have now resumed, otherwise None."""
        self.trained = True
        if event.worker in self._resumed:
            return None
        self._resumed[event.worker] = event
        return self._all_resumed(now)

    def resumed_together(self, event: WorkersResumed, now: float) -> ReportRecovery | None:
        """Record that several members resumed, as if `resumed` were called for each of them."""
        if not self._resumed.keys().isdisjoint(event.workers):
            found = [self.resumed(each, now) for each in event.each()]
            return next((report for report in found if report is not None), None)
        self.trained = True
        self._resumed.update(dict.fromkeys(event.workers, event))
        return self._all_resumed(now)

    def _all_resumed(self, now: float) -> ReportRecovery | None:
        if len(self._resumed) < len(self.members):
            return None
        # Merged reports occur once for each of their workers.
        reports = [
            *{id(each): each for each in self._resumed.values() if each is not None}.values()
        ]
        self._resumed = dict.fromkeys(self._resumed)
        phases: dict[str, float] = {"gathered": (self.published_at - self.cause_at) * 1e3}
        for report in reports:
            for phase, times in report.phases_ms.items():
                ms = max(times) if isinstance(times, list) else times
                phases[phase] = max(ms, phases.get(phase, 0.0))
        return ReportRecovery(
            generation=self.generation,
            kind=self.kind.value,
            reason=self.reason,
            size=len(self.members),
            total_ms=(now - self.cause_at) * 1e3,
            phases_ms=phases,
            copied_bytes=sum(
                sum(each.copied_bytes) if isinstance(each, WorkersResumed) else each.copied_bytes
                for each in reports
            ),
            from_checkpoint=any(report.from_checkpoint for report in reports),
            back_to=self.back_to,
            shards=_divided(reports),
        )

    def digested(self, event: WorkerDigested, roster: Roster) -> tuple[Worker, Worker] | None:
        """Compare a state digest reported by a member with the first digest reported for the same commit.

        Returns:
            The worker assumed to be wrong and the worker assumed to be right, or None if the digests are equal.
        """
        first = self._digests.setdefault(event.commit, (event.worker, event.digest))
        while len(self._digests) > DIGESTS:
            del self._digests[next(iter(self._digests))]
        if first[1] == event.digest:
            return None
        other = roster.get(first[0])
        if other is None or other.killed_for or other.stage is WorkerStage.DISMISSED:
            # The worker that reported the first digest is gone or leaving, so the new digest replaces it.
            self._digests[event.commit] = (event.worker, event.digest)
            return None
        # Lower ranks send their state to higher ranks, so the lower of the two ranks counts as right.
        right, wrong = sorted((first[0], event.worker), key=lambda w: self.places[w].rank)
        return wrong, right


def _divided(reports: Sequence[WorkerResumed | WorkersResumed]) -> ShardsDivided | None:
    parts = [
        (report.worker.host, report.shards)
        for report in reports
        if isinstance(report, WorkerResumed) and report.shards is not None
    ]
    if len(parts) < len(reports):
        return None
    hosts: dict[int, set[str]] = {}
    for host, part in parts:
        for shard in (part.shard, *part.keeps):
            hosts.setdefault(shard, set()).add(host)
    first = parts[0][1]
    return ShardsDivided(
        first.shards,
        min(map(len, hosts.values())) - 1,
        first.restored,
        total_rows(part.rows for _, part in parts),
        sum(part.received for _, part in parts),
        first.lost,
        total_rows(part.lost_rows for _, part in parts),
    )
