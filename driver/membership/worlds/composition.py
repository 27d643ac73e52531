"""Decides who is part of the next world and who may leave before it. Pure.

State outlives those who leave: the last holder of the newest commit stays until somebody who stays holds the same. A
worker whose host left the list goes only if the world can do without it, so that a list that is empty by mistake
stops nothing; so does one whose machine has announced its end, while there is time. One that was asked to leave itself
(SIGTERM) goes however few are left. Before the last checkpoint of a job that stops nobody leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.driver.membership.roster import WorkerRecord
from elastic.driver.membership.scheduling.rank_order import Arrangement, arrange
from elastic.protocol.messages import Commit, Worker


@dataclass(frozen=True)
class Composition:
    """``arrangement`` has everybody in the next world. Who is in no list waits, as a spare."""

    arrangement: Arrangement
    joining: list[WorkerRecord] = field(default_factory=list)
    leaving: list[WorkerRecord] = field(default_factory=list)  # may go now
    rejected: list[WorkerRecord] = field(default_factory=list)  # their state's layout differs
    layout: str = ""


def compose(
    old: Sequence[WorkerRecord],
    new: Sequence[WorkerRecord],
    commits: Mapping[Worker, Commit | None],
    *,
    workers_min: int,
    workers_max: int,
    layout: str = "",
    all_stay: bool = False,
) -> Composition:
    """``old`` members in rank order and ``new`` ones in order of preference, all of them ready.

    ``layout`` is the last world's; that of a holder of the newest commit goes before it.
    """
    newest = max((c for s in old if (c := commits.get(s.worker)) is not None), default=None)
    holders = [s for s in old if commits.get(s.worker) == newest]
    expected = next((s.layout for s in [*holders, *new[: not old]] if s.layout), layout)
    rejected = [s for s in [*old, *new] if s.layout and expected and s.layout != expected]
    odd = set(rejected)
    fitting = [s for s in old if s not in odd]
    willing = [s for s in new if s not in odd and not s.leaving]

    staying = [s for s in fitting if not s.leaving]
    patient = {s for s in fitting if s.patient}
    if all_stay:
        staying, patient = fitting, set()
    elif min(workers_max, len(staying) + len(willing)) < workers_min:
        staying = [s for s in fitting if not s.hurried]
        patient = set()
    keeper: list[WorkerRecord] = []
    if newest is not None and not any(commits.get(s.worker) == newest for s in staying):
        keeper = [s for s in fitting if commits.get(s.worker) == newest][:1]
    here = {*staying, *keeper}
    leaving = [s for s in fitting if (s.hurried or s in patient) and s not in here]
    kept = [s for s in fitting if s in here]

    room = max(0, workers_max - len(kept))
    if keeper and not staying:
        room = max(1, room)  # somebody has to take over from it, even where there is room for one
    joining = willing[:room]
    arrangement = arrange([s.worker for s in kept], [s.worker for s in joining], commits)
    return Composition(arrangement, joining, leaving, rejected, expected)
