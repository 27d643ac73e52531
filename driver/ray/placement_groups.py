"""Decisions about which nodes of a Ray cluster have slots, and which claims to create and remove.

Pure: no I/O, no clock.

A claim is a placement group with one bundle, which holds the resources for one worker. The job holds one claim for each
worker that it can use. Pending claims cause the autoscaler to add nodes.

    state of a claim in Ray                slot?  action
    waiting for resources or its GPU IDs   no     wait
    placed, on a live node                 yes
    placed, on a draining node             no     removed and created again at once, to be placed elsewhere
    placed, on a dead node                 no     kept; Ray places it elsewhere
    gone, though not removed here          no     created again
    with other resources                   no     removed; it belonged to an earlier job of this name
    more than wanted                       no     removed, pending ones first, then the youngest; kept with a worker

The wanted number is the number of slots that the driver needs, which an operator may change by scaling the job. Claims
on a host that an operator drains are kept in addition: replacements are requested on other nodes, and the kept claims
keep other workloads off the host.

A node that was draining is never used again. The removal of a claim is repeated until Ray confirms it, even if Ray has
placed the claim elsewhere meanwhile. A claim on a draining node may be removed before its worker has left, because the
worker does not run inside the claim, and Ray places nothing else on the node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from elastic.errors import Invalid

_LEAST = 1e-4  # Ray's resolution of resource quantities. Smaller differences are ignored.


class ClaimStage(Enum):
    """Stage of a claim: waiting for resources, placed on a node, or gone."""

    WAITING = "waiting"
    PLACED = "placed"
    GONE = "gone"


class Condition(Enum):
    """Condition of a Ray node."""

    ALIVE = "alive"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True)
class Claim:
    """State of a claim, as reported by Ray. Numbers are never reused, so a claim with a larger number is younger."""

    number: int
    stage: ClaimStage
    node: str = ""  # node of the claim, or empty if it is not placed
    ready: bool = True  # whether all data needed to start a worker in the claim is known
    fits: bool = True  # whether the claim has the resources that this job requests


@dataclass(frozen=True)
class Decision:
    """Result of a check of the claims.

    Args:
        seats: for each node, its claims in the order of the slots. Nodes are in order of preference.
    """

    seats: dict[str, list[int]] = field(default_factory=dict)
    make: list[int] = field(default_factory=list)
    remove: list[int] = field(default_factory=list)
    # draining nodes that had slots at the previous check
    drained: list[str] = field(default_factory=list)

    @property
    def placed(self) -> int:
        return sum(len(numbers) for numbers in self.seats.values())


class SlotTable:
    """Assignment of claims to slots.

    Existing claims keep their slots. New claims get the slots after them, oldest claim first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seats: dict[str, list[int]] = {}

    @property
    def all(self) -> Mapping[str, Sequence[int]]:
        """Claims of each node, in the order of their slots."""
        return self._seats

    def want(self, most: int) -> None:
        self._most = most

    def settle(self, placed: Mapping[int, str]) -> dict[str, list[int]]:
        """Assign usable claims to slots. Return, for each node, its claims in the order of their slots.

        Args:
            placed: node of each usable claim. If there are more claims than slots, those that already have a slot take
                precedence.
        """
        kept = {
            node: [number for number in numbers if placed.get(number) == node]
            for node, numbers in self._seats.items()
        }
        seated = {number for numbers in kept.values() for number in numbers}
        room = self._most - len(seated)
        for number in sorted(placed.keys() - seated)[:room]:
            kept.setdefault(placed[number], []).append(number)
        self._seats = {node: numbers for node, numbers in kept.items() if numbers}
        return {node: [*numbers] for node, numbers in self._seats.items()}


class PlacementGroupPool:
    """Pool of the claims of one job.

    If ``ours`` is False, the claims are bundles of the user's placement group, and the pool neither creates nor removes
    claims.
    """

    def __init__(self, most: int, *, ours: bool = True) -> None:
        self._most = most
        self._ours = ours
        self._seats = SlotTable(most)
        self._given_up: set[int] = set()
        self._drained: set[str] = set()
        self._next = 0
        self._some = False  # whether any claim existed at the previous check
        # number of used slots of each node, or None if all slots may be in use
        self._used: Mapping[str, int] | None = None
        self._last = Decision()

    def want(self, most: int, used: Mapping[str, int], emptied: Collection[str]) -> None:
        """Set the number of slots that the driver needs, in addition to those on ``emptied`` nodes.

        Args:
            most: the number of slots.
            used: for each node, the number of slots up to the last one with a worker. These slots are always kept.
            emptied: nodes that an operator drains.
        """
        seats = self._seats.all
        self._most = most + sum(len(seats.get(node, ())) for node in emptied)
        if self._some:  # before the first check, it is unknown which claims have slots
            self._used = {**used, **{node: len(seats.get(node, ())) for node in emptied}}
        self._seats.want(self._most)

    def decide(self, found: Sequence[Claim], nodes: Mapping[str, Condition]) -> Decision:
        """Decide which claims have slots, and which to create and remove.

        If a check finds no nodes, or none of the earlier claims, it is considered invalid and changes nothing.

        Args:
            found: every claim that Ray knows, including removed ones.
            nodes: every node that Ray knows.
        """
        if not nodes or (self._some and not found):
            self._last = Decision(seats=self._last.seats)
            return self._last
        self._some = bool(found)
        self._next = max([self._next, *(claim.number + 1 for claim in found)])
        self._drained |= {node for node, is_ in nodes.items() if is_ is Condition.DRAINING}
        present = [claim for claim in found if claim.stage is not ClaimStage.GONE]
        self._given_up &= {claim.number for claim in present}
        kept = self._keep(present, nodes) if self._ours else present
        seats = self._seats.settle(
            {claim.number: claim.node for claim in kept if self._usable(claim, nodes)}
        )
        missing = self._most - len(kept) if self._ours else 0
        make = [*range(self._next, self._next + missing)]
        self._next += missing
        self._last = Decision(
            seats=seats,
            make=make,
            remove=sorted(self._given_up),
            drained=[each for each in self._last.seats if each in self._drained],
        )
        return self._last

    def _keep(self, present: Iterable[Claim], nodes: Mapping[str, Condition]) -> list[Claim]:
        kept = []
        for claim in present:
            drains = claim.stage is ClaimStage.PLACED and claim.node in self._drained
            if drains or not claim.fits:
                self._given_up.add(claim.number)
            if claim.number not in self._given_up:
                kept.append(claim)
        in_use = {
            claim.number for claim in kept if self._lives(claim, nodes) and self._in_use(claim)
        }
        kept.sort(
            key=lambda claim: (
                claim.number not in in_use,
                not self._lives(claim, nodes),
                claim.number,
            )
        )
        most = max(self._most, len(in_use))
        self._given_up |= {claim.number for claim in kept[most:]}
        return kept[:most]

    def _in_use(self, claim: Claim) -> bool:
        """Return whether removing a claim would affect a worker.

        This is the case if the claim has a worker, or has a lower slot than a claim with a worker, because that claim
        would then move to another slot.
        """
        if self._used is None:
            return True
        seats = self._seats.all.get(claim.node, ())
        return claim.number in seats[: self._used.get(claim.node, 0)]

    def _lives(self, claim: Claim, nodes: Mapping[str, Condition]) -> bool:
        return (
            claim.stage is ClaimStage.PLACED
            and claim.node not in self._drained
            and nodes.get(claim.node) is Condition.ALIVE
        )

    def _usable(self, claim: Claim, nodes: Mapping[str, Condition]) -> bool:
        return claim.ready and claim.fits and self._lives(claim, nodes)

    def unready(self, found: Iterable[Claim], nodes: Mapping[str, Condition]) -> bool:
        """Return whether any claim has no slot only because its GPU IDs are not known yet."""
        return any(
            not claim.ready
            and claim.fits
            and claim.number not in self._given_up
            and self._lives(claim, nodes)
            for claim in found
        )


# ---- resources -------------------------------------------------------------------------------------------------------


def same(left: Mapping[str, float], right: Mapping[str, float]) -> bool:
    """Return whether two bundles request the same resources."""
    names = left.keys() | right.keys()
    return all(
        math.isclose(left.get(name, 0.0), right.get(name, 0.0), rel_tol=1e-6, abs_tol=_LEAST / 2)
        for name in names
    )


def suitable(
    bundles: Mapping[int, Mapping[str, float]],
    resources: Mapping[str, float],
    in_use: Mapping[int, Mapping[str, float]] = {},
) -> list[int]:
    """Return the bundles of the user's group that have room for a worker.

    Args:
        bundles: resources of each bundle of the group.
        resources: resources that a worker needs.
        in_use: resources of each bundle that the calling process uses.

    Raises:
        Invalid: no bundle has room for a worker.
    """
    left = {index: dict(bundle) for index, bundle in sorted(bundles.items())}
    for index in left.keys() & in_use.keys():
        for name, amount in in_use[index].items():
            left[index][name] = left[index].get(name, 0.0) - amount
    found = [index for index, bundle in left.items() if has_room(bundle, resources)]
    if found:
        return found
    listed = ", ".join(f"{{{show(bundle)}}}" for _, bundle in sorted(bundles.items())[:8])
    more = ", ..." if len(bundles) > 8 else ""
    taken = ", ".join(f"{show(amounts)} of bundle {i}" for i, amounts in sorted(in_use.items()))
    but = f", of which the caller has {taken}" if taken else ""
    raise Invalid(
        "no bundle of the placement group has the resources of a worker, which needs "
        f"{show(resources)}: its {len(bundles)}"
        f" bundles are {listed}{more}{but}; add a bundle for each worker, or lower "
        "resources_per_worker to the size of a bundle"
    )


def held(
    resource_ids: Mapping[str, Iterable[tuple[int, float]]], group: str
) -> dict[int, dict[str, float]]:
    """Return the resources of a process in each bundle of its group.

    They are parsed from Ray's resource names, such as CPU_group_1_<id>.
    """
    found: dict[int, dict[str, float]] = {}
    for name, parts in resource_ids.items():
        matched = re.fullmatch(rf"(.+)_group_([0-9]+)_{group}", name)
        # Every process in the group also holds a small amount of the resource "bundle".
        if matched and matched[1] != "bundle":
            found.setdefault(int(matched[2]), {})[matched[1]] = sum(each for _, each in parts)
    return found


def part(ids: Sequence[str], slot: int, slots: int) -> Sequence[str]:
    """Return the GPU IDs that one slot of a bundle uses. Several slots may share a GPU."""
    if len(ids) >= slots:
        each = len(ids) // slots
        return ids[slot * each : (slot + 1) * each]
    return ids[slot * len(ids) // slots :][:1]


def has_room(bundle: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(
        bundle.get(name, 0.0) >= amount - _LEAST / 2 for name, amount in resources.items() if amount
    )


def show(resources: Mapping[str, float]) -> str:
    """Describe resources, for example ``CPU 1, GPU 0.5``. Memory is given in GB."""
    return ", ".join(
        f"{name} {amount / 1e9:.3g} GB" if "memory" in name else f"{name} {amount:g}"
        for name, amount in sorted(resources.items())
        if amount
    )


def shortage(
    *,
    at_least: int,
    placed: int,
    within_s: float,
    resources: Mapping[str, float],
    free: Mapping[str, float],
    nodes: int,
    too_large: bool,
    given: bool,
    labels: Mapping[str, str],
) -> str:
    """Return an explanation of why Ray cannot provide enough slots, with the remedy.

    Args:
        at_least: number of slots that the job needs.
        placed: number of slots that Ray has placed.
        within_s: seconds for which the job has waited.
        resources: resources of each slot.
        free: unused resources of all nodes together, not counting placed claims.
        labels: label selector of the nodes.
    """
    one = at_least == 1
    each = show(resources)
    asked = f"1 worker of {each} was" if one else f"{at_least} workers of {each} each were"
    selector = ", ".join(f"{name}={value}" for name, value in labels.items())
    where = f" on nodes with {selector}" if labels else ""
    could = f"{asked} requested, but {placed} could be placed{where} within {within_s:g} s"
    if given:
        return (
            f"{could}: the placement group has no other suitable bundle that is placed; wait "
            "until the group is ready, or add bundles"
        )
    names: Collection[str] = {*resources, "CPU", "GPU"}
    left = show({name: free.get(name, 0.0) for name in names}) or "nothing"
    noun = "node" if nodes == 1 else "nodes"
    suitable = (
        "large enough for a worker, or none has these labels"
        if labels
        else "large enough for a worker"
    )
    large = f"; no node is {suitable}" if too_large else ""
    return (
        f"{could}; {left} is free on {nodes} {noun}{large}: add nodes, stop other workloads on them, or"
        " request fewer workers (min_workers) or fewer resources for each (resources_per_worker)"
    )
