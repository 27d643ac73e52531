"""Discovery of hosts with free resources in a Ray cluster, for use in scripts. Executors use another discovery."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

from elastic.errors import Invalid


class RayHostDiscovery:
    """Discovery that counts the free resources of the cluster, or of the placement group in which this process runs."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_worker: float = 1, gpus_per_worker: float | None = 1
    ) -> None:
        """Check the arguments.

        Raises:
            Invalid: a worker needs no CPU and no GPU, or a number is negative. Invalid is a ValueError.
        """
        self.use_gpu = use_gpu
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker or 1
        needed = {"CPU": cpus_per_worker} | ({"GPU": self.gpus_per_worker} if use_gpu else {})
        self._needed = {name: amount for name, amount in needed.items() if amount}
        if not self._needed or min(self._needed.values()) < 0:
            raise Invalid(
                f"a worker needs {needed}: pass a positive number of CPUs or GPUs, which may be a fraction"
            )

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots at each address.

        Joins the cluster in RAY_ADDRESS unless this process has joined one.
        """
        import ray

        if not ray.is_initialized():
            ray.init()
        found: dict[str, int] = {}
        for address, resources in rooms():
            slots = self.slots(resources)
            if slots:
                found[address] = found.get(address, 0) + slots
        return found

    def slots(self, resources: Mapping[str, float]) -> int:
        """Return the number of workers for which these resources suffice."""
        # Ray rounds quantities to 1/10000, so a sum of many values may be slightly too small.
        return min(int(resources.get(name, 0) / each + 1e-6) for name, each in self._needed.items())


def rooms() -> list[tuple[str, dict[str, float]]]:
    """Return pairs of an address and free resources.

    There is one pair for each live node or, in a placement group, for each of its bundles.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    from elastic.ray.driver_client import held_of

    nodes: Any = ray.nodes  # the function has no type annotations
    found: list[Mapping[str, Any]] = list(nodes())
    group = ray.util.get_current_placement_group()
    if group is None:
        free: dict[str, dict[str, float]] = {}
        if any("NodeID" in node for node in found):
            free = ray.get(ray.remote(num_cpus=0)(_free_by_node).remote())
        return rooms_of(found, free)
    table: Any = placement_group_table(group)
    alive = {node.get("NodeID"): node["NodeManagerAddress"] for node in found if is_alive(node)}
    in_use = held_of(group)
    return [
        (alive[node], less(table["bundles"][index], in_use.get(index, {})))
        for index, node in table["bundles_to_node_id"].items()
        if node in alive
    ]


def rooms_of(
    nodes: Iterable[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, dict[str, float]]]:
    """Return pairs of an address and free resources for ``nodes``, the result of ``ray.nodes()``.

    Args:
        free: free resources by node ID. If a node has no entry, all of its resources are free.
    """
    return [
        (
            node["NodeManagerAddress"],
            dict(free.get(node.get("NodeID", ""), node.get("Resources", {}))),
        )
        for node in nodes
        if is_alive(node)
    ]


def is_alive(node: Mapping[str, Any]) -> bool:
    """Return whether a node is alive and has an address.

    Older releases of Ray use the key "alive" instead of "Alive".
    """
    return bool(node.get("Alive", node.get("alive"))) and "NodeManagerAddress" in node


def less(bundle: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - taken.get(name, 0.0) for name, amount in bundle.items()}


def _free_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources by node ID. Runs in a task, because a Ray client cannot query the resources itself."""
    from ray._private import state

    free_by_node: Any = state.available_resources_per_node  # the function has no type annotations
    return {str(node): dict(free) for node, free in free_by_node().items()}


class TestDiscovery(RayHostDiscovery):
    """Discovery for tests, which hides or shows a random host every ``change_frequency_s`` seconds."""

    __test__ = False  # tells pytest that this is not a test class

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        """Check the arguments. ``_graceful`` has no effect."""
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
        if not 0 <= min_hosts <= max_hosts:
            raise Invalid(
                f"min_hosts {min_hosts} and max_hosts {max_hosts} allow no number of hosts: pass 0 <= min_hosts <="
                " max_hosts"
            )
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self._change_frequency_s = change_frequency_s
        self._verbose = verbose
        self._hidden: set[str] = set()
        self._changed_at: float | None = None

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        hosts = super().find_available_hosts_and_slots()
        now = time.monotonic()
        if self._changed_at is None:
            self._changed_at = now
        if now - self._changed_at >= self._change_frequency_s:
            self._changed_at = now
            self.change(hosts, random.Random())
        left = {host: slots for host, slots in hosts.items() if host not in self._hidden}
        if self._verbose:
            print(
                f"hosts: {', '.join(left) or 'none'}; hidden: {', '.join(sorted(self._hidden)) or 'none'}"
            )
        return left

    def change(self, hosts: Mapping[str, int], chance: random.Random) -> None:
        """Hide a random host or show a hidden one, so that ``min_hosts`` to ``max_hosts`` hosts are visible."""
        self._hidden &= hosts.keys()
        shown = sorted(hosts.keys() - self._hidden)
        hide = len(shown) > self._min_hosts and (
            len(shown) >= self._max_hosts or not self._hidden or chance.random() < 0.5
        )
        if hide:
            self._hidden.add(chance.choice(shown))
        elif self._hidden:
            self._hidden.remove(chance.choice(sorted(self._hidden)))


__all__ = ["RayHostDiscovery", "TestDiscovery"]
