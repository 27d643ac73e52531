"""Interface to a Ray cluster, which tests can replace, and the resources that a job requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from elastic.errors import Invalid

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class RayUnavailable(Exception):
    """Error raised when Ray does not respond, or responds with an error. The message is the reason."""


class Group(NamedTuple):
    """State of a placement group, as reported by Ray."""

    id: str
    name: str
    state: str  # PENDING, PREPARED, CREATED, RESCHEDULING or REMOVED
    bundles: dict[int, dict[str, float]]
    nodes: dict[int, str]  # node of each bundle, or "" if the bundle is not placed
    infeasible: bool = False  # whether no node of the cluster is large enough for the group


class Node(NamedTuple):
    """State of a node, as reported by Ray."""

    address: str
    alive: bool


class Cluster(Protocol):
    """Interface for operations on a Ray cluster. All operations may block, and may raise RayUnavailable.

    The implementation is `discovery_calls.RayCalls`.
    """

    def claims(self, prefix: str) -> list[Group]:
        """Return the placement groups of this namespace with this name prefix, including removed ones."""

    def group(self, id: str) -> Group | None: ...

    def nodes(self) -> dict[str, Node]: ...

    def draining(self) -> dict[str, float | None] | None:
        """Return the draining nodes, or None if this release of Ray does not report them.

        The value for each node is its deadline in seconds since 1970, after which Ray may terminate it, or None if it
        has no deadline.
        """

    def make(
        self, name: str, bundle: Mapping[str, float], labels: Mapping[str, str], *, detached: bool
    ) -> None:
        """Create a placement group with one bundle, on a node whose labels match the selector ``labels``."""

    def remove(self, id: str) -> None: ...

    def gpus(self, group: Group, index: int, share: float) -> list[str] | None:
        """Return the GPU IDs of a placed bundle. Return None while the query is in progress."""

    def free(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class ClusterRequest:
    """Resources that a job requests from a Ray cluster.

    Args:
        most: maximum number of slots.
        resources: resources of each slot.
        group: the user's placement group, whose bundles are used. It is never removed. None means that the job creates
            groups.
        in_use: resources that the calling process itself uses, by bundle.
        per_bundle: number of slots in each bundle that has the resources for them.
        labels: Ray label selector for the nodes on which the job creates groups.
    """

    most: int
    resources: Mapping[str, float]
    group: PlacementGroup | None = None
    in_use: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    per_bundle: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise Invalid if the number of workers or the resources of a worker are out of range."""
        if self.most < 1:
            raise Invalid(f"the number of workers is {self.most}: pass at least 1")
        for name, amount in self.resources.items():
            if not isinstance(amount, (int, float)) or not amount >= 0:
                raise Invalid(
                    f"resources_per_worker: {name} is {amount!r}: pass a number of at least 0"
                )
        if not any(self.resources.values()):
            raise Invalid("resources_per_worker requests nothing: pass at least {'CPU': 1}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise Invalid(
                f"resources_per_worker: GPU is {self.gpus:g}: pass a fraction below 1, or a whole number of GPUs"
            )

    @property
    def gpus(self) -> float:
        return float(self.resources.get("GPU", 0))


def prefix_of(job: str) -> str:
    """Return the common name prefix of a job's claims. In each name, a number follows the prefix."""
    return f"hvd-elastic:{job}:"


def numbered(groups: Iterable[Group], prefix: str) -> list[tuple[int, Group]]:
    """Return the claims of the job, as pairs of a claim's number and its placement group."""
    matched = (
        (re.fullmatch(re.escape(prefix) + "([0-9]+)", group.name), group) for group in groups
    )
    return [(int(match[1]), group) for match, group in matched if match]


def present(cluster: Cluster, prefix: str) -> list[tuple[int, Group]]:
    """Return the claims that still exist in the cluster, as pairs of a claim's number and its placement group."""
    found = numbered(cluster.claims(prefix), prefix)
    return [(number, group) for number, group in found if group.state != "REMOVED"]
