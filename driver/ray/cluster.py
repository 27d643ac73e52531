"""What a job wants of a Ray cluster, and what is needed of Ray for it: a seam, so that tests can take its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from elastic.errors import Invalid

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class Unanswered(Exception):
    """Ray did not answer; the text says what it said instead."""


class Group(NamedTuple):
    """A placement group, as Ray tells it."""

    id: str
    name: str
    state: str  # PENDING, PREPARED, CREATED, RESCHEDULING or REMOVED
    bundles: dict[int, dict[str, float]]
    nodes: dict[int, str]  # where each bundle is placed, or ""
    infeasible: bool = False  # no node has as much


class Node(NamedTuple):
    """A node, as Ray tells it."""

    address: str
    alive: bool


class Cluster(Protocol):
    """What is needed of Ray. All of it may block, and raises Unanswered; `discovery_calls.RayCalls` is the real one."""

    def claims(self, prefix: str) -> list[Group]:
        """The placement groups of this namespace whose names begin so, those that were removed included."""

    def group(self, id: str) -> Group | None: ...

    def nodes(self) -> dict[str, Node]: ...

    def draining(self) -> set[str] | None:
        """None: this Ray does not tell."""

    def make(self, name: str, bundle: Mapping[str, float], *, detached: bool) -> None: ...

    def remove(self, id: str) -> None: ...

    def gpus(self, group: Group, index: int, share: float) -> list[str] | None:
        """The ids of the GPUs of a bundle that is placed, or None as long as they are being asked there."""

    def free(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Wanted:
    """``most`` slots, each with these resources. ``group``: only in bundles of this one, which stays whatever happens.

    ``in_use``: what the caller has of which bundle. ``per_bundle``: so many slots in each with room for them.
    """

    most: int
    resources: Mapping[str, float]
    group: PlacementGroup | None = None
    in_use: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    per_bundle: int = 1

    def __post_init__(self) -> None:
        """Raises Invalid."""
        if self.most < 1:
            raise Invalid(f"the number of workers must be at least 1, got {self.most}")
        for name, amount in self.resources.items():
            if not isinstance(amount, (int, float)) or not amount >= 0:
                raise Invalid(
                    f"resources_per_worker: {name} is {amount!r}: pass a number, 0 or more"
                )
        if not any(self.resources.values()):
            raise Invalid("resources_per_worker requests nothing: pass at least {'CPU': 1}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise Invalid(
                f"resources_per_worker: GPU is {self.gpus:g}: Ray allocates fractions of one GPU, or whole GPUs"
            )

    @property
    def gpus(self) -> float:
        return float(self.resources.get("GPU", 0))


def prefix_of(job: str) -> str:
    """With which the names of a job's claims begin; a number follows, and nothing else."""
    return f"hvd-elastic:{job}:"


def numbered(groups: Iterable[Group], prefix: str) -> list[tuple[int, Group]]:
    """The claims among these groups."""
    matched = (
        (re.fullmatch(re.escape(prefix) + "([0-9]+)", group.name), group) for group in groups
    )
    return [(int(match[1]), group) for match, group in matched if match]


def present(cluster: Cluster, prefix: str) -> list[tuple[int, Group]]:
    """The claims that were not removed."""
    found = numbered(cluster.claims(prefix), prefix)
    return [(number, group) for number, group in found if group.state != "REMOVED"]
