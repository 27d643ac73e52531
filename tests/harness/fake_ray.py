"""A Ray cluster that a test controls: nodes with resources, placement groups that are placed as by Ray. No clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from elastic.driver.ray.cluster import Group, Node, RayUnavailable


@dataclass
class FakeNode:
    address: str
    room: int  # for bundles
    alive: bool = True
    draining: bool = False
    ends_at: float | None = None  # deadline of the drain


@dataclass
class FakeGroup:
    id: str
    name: str
    bundles: list[dict[str, float]]
    state: str = "PENDING"
    nodes: list[str] = field(default_factory=list)


class FakeRay:
    """Places pending groups in ``tick``. ``trouble``: exception of every call."""

    def __init__(self, **rooms: int) -> None:
        self.table: dict[str, FakeNode] = {}
        self.groups: dict[str, FakeGroup] = {}
        self.trouble = ""
        self.tells_drains = True
        self.gpus_known = True
        self.said: list[str] = []  # requested operations
        for name, room in rooms.items():
            self.add(name, room)

    # ---- changes of the cluster

    def add(self, name: str, room: int) -> None:
        self.table[name] = FakeNode(f"10.0.0.{len(self.table) + 1}", room)

    def drain(self, name: str, ends_at: float | None = None) -> None:
        self.table[name].draining = True
        self.table[name].ends_at = ends_at

    def kill(self, name: str) -> None:
        """Its groups are placed elsewhere at the next tick; until then Ray reports the old place."""
        self.table[name].alive = False

    def tick(self) -> None:
        for group in self.groups.values():
            if group.state == "REMOVED":
                continue
            for index, node in enumerate(group.nodes):
                if node and not self.table[node].alive:
                    group.nodes[index] = ""
                    group.state = "RESCHEDULING"
            for index, node in enumerate(group.nodes):
                group.nodes[index] = node or self._somewhere()
            if all(group.nodes):
                group.state = "CREATED"

    def _somewhere(self) -> str:
        for name, node in self.table.items():
            if node.alive and not node.draining and self.used(name) < node.room:
                return name
        return ""

    def used(self, name: str) -> int:
        return sum(g.nodes.count(name) for g in self.groups.values() if g.state != "REMOVED")

    def given(self, *bundles: dict[str, float], id: str = "aa") -> Any:
        """Return the handle of a group of another caller."""
        self.groups[id] = FakeGroup(id, "theirs", list(bundles), nodes=[""] * len(bundles))
        return SimpleNamespace(id=SimpleNamespace(hex=lambda: id))

    @property
    def live(self) -> dict[str, str]:
        """Return the groups that were not removed: name -> node."""
        return {g.name: g.nodes[0] for g in self.groups.values() if g.state != "REMOVED"}

    # ---- queries of a discovery

    def _answer(self) -> None:
        if self.trouble:
            raise RayUnavailable(self.trouble)

    def _tell(self, group: FakeGroup) -> Group:
        return Group(
            group.id,
            group.name,
            group.state,
            dict(enumerate(group.bundles)),
            dict(enumerate(group.nodes)),
            infeasible=max(bundle.get("CPU", 0) for bundle in group.bundles) > 64,
        )

    def claims(self, prefix: str) -> list[Group]:
        self._answer()
        return [self._tell(g) for g in self.groups.values() if g.name.startswith(prefix)]

    def group(self, id: str) -> Group | None:
        self._answer()
        return self._tell(self.groups[id]) if id in self.groups else None

    def nodes(self) -> dict[str, Node]:
        self._answer()
        return {name: Node(node.address, node.alive) for name, node in self.table.items()}

    def draining(self) -> dict[str, float | None] | None:
        self._answer()
        table = self.table.items()
        drains = {name: node.ends_at for name, node in table if node.draining and node.alive}
        return drains if self.tells_drains else None

    def make(
        self, name: str, bundle: Mapping[str, float], labels: Mapping[str, str], *, detached: bool
    ) -> None:
        self._answer()
        assert name not in self.live, f"{name} exists"
        where = "".join(f" on {key}={value}" for key, value in labels.items())
        self.said.append(f"make {name.rpartition(':')[2]}{' for ever' if detached else ''}{where}")
        id = f"{len(self.groups):02x}"
        self.groups[id] = FakeGroup(id, name, [dict(bundle)], nodes=[""])

    def remove(self, id: str) -> None:
        self._answer()
        group = self.groups[id]
        if group.state != "REMOVED":
            self.said.append(f"remove {group.name.rpartition(':')[2]}")
            group.state = "REMOVED"

    def gpus(self, group: Group, index: int, share: float) -> list[str] | None:
        self._answer()
        if not self.gpus_known:
            return None
        return [f"{group.nodes[index]}{group.id}{index}.{n}" for n in range(max(1, int(share)))]

    def free(self) -> dict[str, float]:
        self._answer()
        room = sum(n.room - self.used(name) for name, n in self.table.items() if n.alive)
        return {"CPU": float(room), "node:10.0.0.1": 1.0, "CPU_group_aa": 7.0}
