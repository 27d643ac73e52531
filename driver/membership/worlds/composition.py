"""Composition of the next world, and selection of the workers that may leave when it forms. Pure: no I/O, no clock.

The state must survive departures, so the last holder of the newest commit stays until another remaining worker holds
the commit. A worker on a host that is no longer listed leaves only if enough other workers stay, so that an empty host
list does not end training. The same applies to a worker on a machine that will be reclaimed, until shortly before this
happens. A worker that received SIGTERM leaves even if too few workers stay. While a stopping job waits for its last
checkpoint, no worker leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from elastic.driver.membership.records.roster import WorkerRecord
from elastic.driver.membership.scheduling.rank_order import RankOrder, arrange, newest_of
from elastic.protocol.messages import Commit, Worker


@dataclass(frozen=True)
class Composition:
    """Proposed next world.

    ``arrangement`` contains its workers in rank order. Workers in none of the fields wait as standbys.
    """

    arrangement: RankOrder
    joining: list[WorkerRecord] = field(default_factory=list)
    leaving: list[WorkerRecord] = field(default_factory=list)  # workers that may leave now
    # workers whose state layout differs from that of the world
    rejected: list[WorkerRecord] = field(default_factory=list)
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
    """Compose the next world from ready workers.

    Args:
        old: members of the last world, in rank order.
        new: joining workers, in order of preference.
        commits: newest commit of each worker.
        workers_min: smallest size of a world.
        workers_max: largest size of a world.
        layout: state layout of the last world. If a worker holds the newest commit, its layout is used instead.
        all_stay: whether all workers must stay.
    """
    held = [commits.get(s.worker) for s in old]
    newest = newest_of(held)
    holders = (s for s, commit in zip(old, held, strict=True) if commit == newest)
    expected = next((s.layout for s in chain(holders, new[: not old]) if s.layout), layout)
    rejected = []
    if expected:
        fit = ("", expected)
        rejected = [s for s in chain(old, new) if s.layout not in fit]
    odd = set(rejected)
    fitting = [s for s in old if s not in odd] if odd else [*old]
    willing = [s for s in new if s not in odd and not s.leaving]
    if not any(s.leaving or s.unlisted or s.noticed for s in fitting):
        # The usual case. In a large job, the other cases take several times as long.
        joining = willing[: max(0, workers_max - len(fitting))]
        arrangement = arrange([s.worker for s in fitting], [s.worker for s in joining], commits)
        return Composition(arrangement, joining, [], rejected, expected)

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
        # Only a leaving worker holds the state, so another worker must join to receive it, even if the world has no
        # room.
        room = max(1, room)
    joining = willing[:room]
    arrangement = arrange([s.worker for s in kept], [s.worker for s in joining], commits)
    return Composition(arrangement, joining, leaving, rejected, expected)
