"""Evaluation of a DiLoCo job whose workers are killed and return: stalls, and lost inner steps. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tests_on_path  # noqa: F401
from stress.hosts.steps import ENTERED, WorkerNotes

EVERY, FRAGMENTS, DELAY = 48, 4, 10  # torchft requires that every fragment has as many steps
# inner steps after which a new worker has merged fragments with the others
SETTLE = 2 * EVERY // FRAGMENTS


@dataclass(frozen=True)
class Kill:
    """``at``, ``joined``: seconds on the machine's monotonic clock. ``joined``: the new worker trains with all."""

    pid: int
    at: float
    joined: float


@dataclass(frozen=True)
class Outage:
    """A kill for one survivor.

    Args:
        kill_ms: longest gap until the quorum or world without the killed worker, minus the median inner step.
        join_ms: the same afterwards. None if the survivor had no quorum between the killed and the new worker.
        lost_s: duration of the whole outage, minus the time of as many inner steps of median duration.
    """

    host: str
    kill_ms: float
    join_ms: float | None
    lost_s: float


@dataclass(frozen=True)
class Quiet:
    """A round without faults: milliseconds of the round and of the median inner step, bytes that host a has sent."""

    round_ms: float
    step_ms: float
    sent: int


@dataclass(frozen=True)
class Side:
    """Results of a library.

    Args:
        restart_s: from each kill until the new worker trains with the others.
        undone: inner steps that each undone sync or commit has cost a survivor, weighted with the fragment's share of
            the parameters.
        victims: inner steps of each killed worker that are in no merge, as the mean of its fragments.
        differing: number of merges after which the outer parameters differed between workers.
    """

    name: str
    quiet: Quiet
    outages: list[Outage]
    restart_s: list[float]
    undone: list[float]
    victims: list[float]
    merges: int
    differing: int


def outage_of(worker: WorkerNotes, kill: Kill, size: int) -> Outage | None:
    """Evaluate a kill for a worker of a job of ``size`` workers. None unless it has trained before and afterwards."""
    commits = [each.at for each in worker.commits()]
    after = [at for at in commits if at > kill.joined]
    if not commits or commits[0] > kill.at or len(after) < SETTLE:
        return None
    gaps = [(a, b) for a, b in pairwise(commits) if b > kill.at and a < after[SETTLE - 1]]
    step = statistics.median(b - a for a, b in pairwise(commits))
    smaller = [
        each.at
        for each in worker.notes
        if each.kind == ENTERED and kill.at < each.at < kill.joined and each.size < size
    ]
    last = smaller[0] if smaller else math.inf
    earlier = max(b - a for a, b in gaps if a < last)
    later = max((b - a for a, b in gaps if a >= last), default=None)
    return Outage(
        worker.host,
        1e3 * (earlier - step),
        None if later is None else 1e3 * (later - step),
        gaps[-1][1] - gaps[0][0] - len(gaps) * step,
    )


def in_no_merge(commits: Sequence[float], merges: Sequence[float], fragments: int) -> float:
    """Return the inner steps of a killed worker that are in no merge, as the mean of its fragments.

    Args:
        commits, merges: times of its inner steps and merges, in ascending order.
    """
    latest = merges[-fragments:]
    ages = [sum(at > merge for at in commits) + DELAY for merge in latest]
    return statistics.fmean(ages + [len(commits)] * (fragments - len(latest)))


def side_of(
    name: str,
    quiet: Quiet,
    workers: Mapping[int, WorkerNotes],
    records: Mapping[int, Sequence[Mapping[str, Any]]],
    kills: Sequence[Kill],
    size: int,
) -> Side:
    """Evaluate a job of ``size`` workers by the notes and records of its processes."""
    found = [outage_of(worker, kill, size) for kill in kills for worker in workers.values()]
    lines = [each for record in records.values() for each in record]
    digests = defaultdict(set)
    for each in lines:
        if each["what"] == "merged":
            digests[each["merges"]].add(each["digest"])
    victims = []
    for kill in kills:
        commits = [each.at for each in workers[kill.pid].commits()]
        merges = [each["at"] for each in records[kill.pid] if each["what"] == "merged"]
        victims.append(in_no_merge(commits, merges, FRAGMENTS))
    return Side(
        name,
        quiet,
        [each for each in found if each is not None],
        [kill.joined - kill.at for kill in kills],
        [each["lost"] for each in lines if each.get("lost")],
        victims,
        len(digests),
        sum(len(values) > 1 for values in digests.values()),
    )
