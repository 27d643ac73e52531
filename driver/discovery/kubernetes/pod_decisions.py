"""Decisions about pods: which are hosts, which are about to end, and which to delete by force. Pure: no I/O, no clock.

    pod created --> queued, until Kueue admits the pod
                --> running, with an address: a host --> ended or deleted: not a host
                    deletion requested, or its node is about to end: a notice with the remaining time
                    deletion is overdue: not a host; if its node is unreachable, the pod may be deleted by force

Kubernetes keeps the pod of a lost node in the state of deletion until the pod's end is reported, and a StatefulSet
creates no replacement until then. After a forced deletion, the pod's process may still run. This is harmless: the host
was removed when its liveness timeout expired, and the process belongs to a generation that has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastic.driver.discovery.kubernetes.api_objects import (
    Json,
    KubernetesNode,
    Pod,
    meaning_of,
    natural,
    node_of,
    pod_of,
)

OVERDUE_S = 2.0  # seconds after the end of its grace period from which a pod is overdue


@dataclass(frozen=True)
class PodEnding:
    """Announced end of a pod.

    Args:
        at: time of the end in seconds since the epoch, or None if unknown.
    """

    text: str
    at: float | None


class Pods:
    """Pods and nodes, as last reported by the API server.

    Args:
        slots: number of slots of each pod. None means the pod's number of GPUs, at least 1.
        notices: further taints and conditions that announce the end of a node.
    """

    def __init__(self, slots: int | None = None, notices: Collection[str] = ()) -> None:
        self._slots = slots
        self._notices = notices
        self._pods: dict[str, Pod] = {}  # keyed by uid
        self._nodes: dict[str, KubernetesNode] = {}  # keyed by name
        # time at which each taint or condition of a node was first observed
        self._tainted: dict[tuple[str, str], float] = {}
        self._order: list[str] = []  # order of the hosts in the last list

    # ---- input -----------------------------------------------------------------------------------------------------

    def listed(self, objects: Iterable[Json]) -> None:
        """Replace all pods with a new list from the API server."""
        found = [pod for object in objects if (pod := pod_of(object)) is not None]
        self._pods = {pod.uid: pod for pod in found}

    def changed(self, object: Json, *, deleted: bool) -> None:
        """Apply the addition, modification or deletion of one pod."""
        pod = pod_of(object)
        if pod is None:
            return
        if deleted:
            self._pods.pop(pod.uid, None)
        else:
            self._pods[pod.uid] = pod

    def nodes_listed(self, objects: Iterable[Json], now: float) -> None:
        """Replace all nodes with a new list from the API server."""
        nodes = (node_of(object, self._notices) for object in objects)
        found = [node for node in nodes if node is not None]
        self._nodes = {node.name: node for node in found}
        self._date_taints(now)

    def node_changed(self, object: Json, now: float, *, deleted: bool) -> None:
        """Apply the addition, modification or deletion of one node."""
        node = node_of(object, self._notices)
        if node is None:
            return
        # Keep a deleted node as unreachable, because its pods may be listed for some time.
        self._nodes[node.name] = KubernetesNode(node.name, reachable=False) if deleted else node
        self._date_taints(now)

    # ---- output ----------------------------------------------------------------------------------------------------

    def hosts(self, now: float) -> dict[str, int]:
        """Return the number of slots of each running pod, keyed by the pod's address.

        Known hosts keep their order. New hosts are appended by name.
        """
        running = {pod.address: pod for pod in self._newest() if not _late(pod, now)}
        existing = [address for address in self._order if address in running]
        new = sorted(running.keys() - set(existing), key=lambda each: natural(running[each].name))
        self._order = [*existing, *new]
        return {address: self._slots or max(1, running[address].gpus) for address in self._order}

    def endings(self, now: float) -> dict[str, PodEnding]:
        """Return the announced end of each host, which is the earlier of the ends of its pod and its node."""
        hosts = self.hosts(now)
        found = {}
        for pod in self._newest():
            ends = [*self._announced(pod)]
            if ends and pod.address in hosts:
                found[pod.address] = min(
                    ends, key=lambda each: float("inf") if each.at is None else each.at
                )
        return found

    def queued(self) -> int:
        """Return the number of pods that wait for admission by Kueue."""
        return sum(pod.queued and pod.ends_at is None for pod in self._pods.values())

    def overdue(self, now: float) -> list[Pod]:
        """Return the overdue pods on unreachable nodes, which only a forced deletion can remove."""
        return [
            pod
            for pod in self._pods.values()
            if _late(pod, now) and (node := self._nodes.get(pod.node)) and not node.reachable
        ]

    def next_look(self, now: float) -> float | None:
        """Return the seconds until the next pod becomes overdue, or None if no pod will become overdue."""
        ends = [pod.ends_at + OVERDUE_S for pod in self._pods.values() if pod.ends_at is not None]
        later = [at - now for at in ends if at > now]
        return min(later) if later else None

    def place_of(self, address: str) -> str:
        """Return the names of a host's pod and node, for log lines."""
        for pod in self._newest():
            if pod.address == address:
                return f"pod {pod.name}" + (f" on node {pod.node}" if pod.node else "")
        return address

    def _newest(self) -> list[Pod]:
        """Return the running pods with distinct addresses.

        Addresses are reused, so only the newest pod with an address is returned.
        """
        running = sorted((pod for pod in self._pods.values() if pod.runs), key=lambda p: p.created)
        return [*{pod.address: pod for pod in running}.values()]

    def _announced(self, pod: Pod) -> Iterable[PodEnding]:
        if pod.ends_at is not None or pod.ended_by:
            yield PodEnding(f"{pod.ended_by or 'Kubernetes deletes'} pod {pod.name}", pod.ends_at)
        node = self._nodes.get(pod.node)
        for key in () if node is None else node.ending:
            text, within_s = meaning_of(key)
            at = None if within_s is None else self._tainted[pod.node, key] + within_s
            yield PodEnding(f"node {pod.node}: {text}", at)

    def _date_taints(self, now: float) -> None:
        self._tainted = {
            (node.name, key): self._tainted.get((node.name, key), now)
            for node in self._nodes.values()
            for key in node.ending
        }


def _late(pod: Pod, now: float) -> bool:
    return pod.ends_at is not None and now >= pod.ends_at + OVERDUE_S


def differences(
    before: Mapping[str, PodEnding], after: Mapping[str, PodEnding]
) -> Iterable[tuple[str, PodEnding | None]]:
    """Yield the hosts with a new, changed or withdrawn announcement of their end.

    Each host is yielded with its announced end, or None if the announcement was withdrawn.
    """
    for host in before.keys() - after.keys():
        yield host, None
    for host, ending in after.items():
        if before.get(host) != ending:
            yield host, ending
