"""Calls to Ray for host discovery. Imported only if Ray is used. All calls may block.

Ray has no public function that lists draining nodes. The private function used here exists in 2.30, the oldest
supported release, and in 2.60. If it is missing, draining nodes are not detected.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic.driver.ray.cluster import Group, Node, RayUnavailable, prefix_of, present
from elastic.driver.ray.placement_groups import held
from elastic.errors import Invalid

_untyped: Any = ray


class RayCalls:
    """Implementation of `elastic.driver.ray.cluster.Cluster` for the cluster that this process is connected to."""

    def __init__(self) -> None:
        # for each group ID, whether the placement group belongs to this namespace
        self._ours: dict[str, bool] = {}
        # for each group, bundle and node, the task that queries its GPU IDs
        self._asked: dict[tuple[str, int, str], Any] = {}

    def claims(self, prefix: str) -> list[Group]:
        with _answering():
            table = ray.util.placement_group_table()
        groups = [_group(id, info) for id, info in table.items() if info["name"].startswith(prefix)]
        return [group for group in groups if self._is_ours(group)]

    def _is_ours(self, group: Group) -> bool:
        """Return whether a placement group belongs to this namespace.

        Ray's table contains the groups of all namespaces, but not the names of the namespaces.
        """
        if group.id not in self._ours and group.state != "REMOVED":
            with _answering():
                try:
                    named = ray.util.get_placement_group(group.name)
                except ValueError:  # this namespace has no group with this name
                    named = None
            self._ours[group.id] = named is not None and named.id.hex() == group.id
        return self._ours.get(group.id, False)

    def group(self, id: str) -> Group | None:
        with _answering():
            info = ray.util.placement_group_table(_handle(id))
        return _group(id, info) if info else None

    def nodes(self) -> dict[str, Node]:
        with _answering():
            rows = _untyped.nodes()
        return {row["NodeID"]: Node(row["NodeManagerAddress"], bool(row["Alive"])) for row in rows}

    def draining(self) -> dict[str, float | None] | None:
        state = getattr(getattr(ray._private, "state", None), "state", None)
        ask = getattr(state, "get_draining_nodes", None)
        if ask is None:
            return None
        with _answering():
            return {node: until_ms / 1000 or None for node, until_ms in ask().items()}

    def make(
        self, name: str, bundle: Mapping[str, float], labels: Mapping[str, str], *, detached: bool
    ) -> None:
        more: Any = {"lifetime": "detached"} if detached else {}
        if labels:  # this argument does not exist in releases of Ray without label selectors
            more["bundle_label_selector"] = [dict(labels)]
        with _answering():
            made = ray.util.placement_group([dict(bundle)], name=name, **more)
        self._ours[made.id.hex()] = True

    def remove(self, id: str) -> None:
        with _answering():
            ray.util.remove_placement_group(_handle(id))

    def gpus(self, group: Group, index: int, share: float) -> list[str] | None:
        key = (group.id, index, group.nodes[index])
        with _answering():
            if key not in self._asked:
                strategy = PlacementGroupSchedulingStrategy(
                    placement_group=_handle(group.id), placement_group_bundle_index=index
                )
                task = _VISIBLE.options(num_gpus=share, scheduling_strategy=strategy)
                self._asked[key] = task.remote()
            ready, _ = ray.wait([self._asked[key]], timeout=0)
            if not ready:
                return None
            return [str(each) for each in ray.get(self._asked.pop(key))]

    def free(self) -> dict[str, float]:
        with _answering():
            return dict(_untyped.available_resources())


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise Invalid if the installed Ray has no label selectors, or rejects this one."""
    if not labels:
        return
    if "bundle_label_selector" not in inspect.signature(ray.util.placement_group).parameters:
        raise Invalid(
            f"label_selector needs placement groups with label selectors, which Ray {ray.__version__} does not have:"
            " install a later release of Ray"
        )
    check: Any = getattr(ray.util.placement_group, "__module__", "")
    validate = getattr(sys.modules.get(check), "_validate_bundle_label_selector", None)
    if validate is not None:
        # Otherwise, an invalid selector would be detected only when the first group is created.
        try:
            validate([dict(labels)])
        except ValueError as error:
            raise Invalid(f"label_selector is {dict(labels)}: {error}") from None


def held_of(group: PlacementGroup) -> dict[int, dict[str, float]]:
    """Return the resources that this task or actor holds in each bundle of its placement group.

    Ray's public function returns only the total of all bundles.
    """
    own: Any = ray._private.worker.global_worker
    return held(own.core_worker.resource_ids(), group.id.hex())


def remove_claims(job: str) -> int:
    """Remove the claims of a driver that was killed. Return the number of removed claims."""
    calls = RayCalls()
    left = present(calls, prefix_of(job))
    for _, group in left:
        calls.remove(group.id)
    return len(left)


def _visible() -> list[str]:
    """Return the GPU IDs of a bundle. Runs as a task in the bundle, and briefly reserves all its GPUs."""
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


_VISIBLE = ray.remote(num_cpus=0)(_visible)


def _handle(id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id)))


def _group(id: str, info: Mapping[str, Any]) -> Group:
    return Group(
        id=id,
        name=info["name"],
        state=info["state"],
        bundles={index: dict(bundle) for index, bundle in info["bundles"].items()},
        nodes=dict(info["bundles_to_node_id"]),
        infeasible=info["stats"]["scheduling_state"] == "INFEASIBLE",
    )


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (ray.exceptions.RayError, OSError, RuntimeError, TimeoutError) as error:
        raise RayUnavailable(f"{type(error).__name__}: {error}".splitlines()[0][:300]) from error
