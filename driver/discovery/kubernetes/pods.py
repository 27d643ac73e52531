"""Decides which pods are hosts, which of them end, and which are to be deleted for good. Pure.

    pod is made --> runs and has an address: a host --> ended, or gone: no host any more
                      deletion begun, or its node ends: a notice, with the time that is left
                      deletion is overdue: no host; and where its node is not heard of, it may be deleted by force

Kubernetes keeps a pod of a lost node in deletion until somebody says that it is gone, and a StatefulSet makes no other
before. Its process may live on there. It harms nobody: its host was given up with its lease, and it belongs to a world
that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.driver.discovery.kubernetes.objects import (
    ENDING,
    Json,
    KubernetesNode,
    Pod,
    natural,
    node_of,
    pod_of,
)

OVERDUE_S = 2.0  # after the end of its grace period a pod should be gone


@dataclass(frozen=True)
class PodEnding:
    """``at``: seconds since the epoch, None if not known."""

    text: str
    at: float | None


class Pods:
    """``slots``: of each pod; None: as many as it has GPUs, or one."""

    def __init__(self, slots: int | None = None) -> None:
        self._slots = slots
        self._pods: dict[str, Pod] = {}  # by uid
        self._nodes: dict[str, KubernetesNode] = {}  # by name
        self._tainted: dict[tuple[str, str], float] = {}  # node and taint -> when it was first seen
        self._order: list[str] = []  # of the hosts, as they were last

    # ---- what is told ----------------------------------------------------------------------------------------------

    def listed(self, objects: Iterable[Json]) -> None:
        """All pods there are."""
        found = [pod for object in objects if (pod := pod_of(object)) is not None]
        self._pods = {pod.uid: pod for pod in found}

    def changed(self, object: Json, *, deleted: bool) -> None:
        """One pod has come, changed or gone."""
        pod = pod_of(object)
        if pod is None:
            return
        if deleted:
            self._pods.pop(pod.uid, None)
        else:
            self._pods[pod.uid] = pod

    def nodes_listed(self, objects: Iterable[Json], now: float) -> None:
        """All nodes there are."""
        found = [node for object in objects if (node := node_of(object)) is not None]
        self._nodes = {node.name: node for node in found}
        self._date(now)

    def node_changed(self, object: Json, now: float, *, deleted: bool) -> None:
        """One node has come, changed or gone."""
        node = node_of(object)
        if node is None:
            return
        # What was deleted is not heard of any more; its pods may still be listed for a while.
        self._nodes[node.name] = KubernetesNode(node.name, reachable=False) if deleted else node
        self._date(now)

    # ---- what follows ----------------------------------------------------------------------------------------------

    def hosts(self, now: float) -> dict[str, int]:
        """Address and slots of each pod that runs: those that stay keep their order, others follow by their names."""
        running = {pod.address: pod for pod in self._newest() if not _late(pod, now)}
        stay = [address for address in self._order if address in running]
        come = sorted(running.keys() - set(stay), key=lambda each: natural(running[each].name))
        self._order = [*stay, *come]
        return {address: self._slots or max(1, running[address].gpus) for address in self._order}

    def endings(self, now: float) -> dict[str, PodEnding]:
        """Of the hosts that announce their end: the earlier one of the pod's and its node's."""
        hosts = self.hosts(now)
        found = {}
        for pod in self._newest():
            ends = [*self._announced(pod)]
            if ends and pod.address in hosts:
                found[pod.address] = min(
                    ends, key=lambda each: float("inf") if each.at is None else each.at
                )
        return found

    def overdue(self, now: float) -> list[Pod]:
        """Pods that only a deletion by force removes."""
        return [
            pod
            for pod in self._pods.values()
            if _late(pod, now) and (node := self._nodes.get(pod.node)) and not node.reachable
        ]

    def next_look(self, now: float) -> float | None:
        """Seconds until a pod becomes overdue, if nothing is told before."""
        ends = [pod.ends_at + OVERDUE_S for pod in self._pods.values() if pod.ends_at is not None]
        later = [at - now for at in ends if at > now]
        return min(later) if later else None

    def place_of(self, address: str) -> str:
        """Pod and node of a host, for people."""
        for pod in self._newest():
            if pod.address == address:
                return f"pod {pod.name}" + (f" on node {pod.node}" if pod.node else "")
        return address

    def _newest(self) -> list[Pod]:
        """Those that run; of two with one address the later one, as an address may be given again."""
        running = sorted((pod for pod in self._pods.values() if pod.runs), key=lambda p: p.created)
        return [*{pod.address: pod for pod in running}.values()]

    def _announced(self, pod: Pod) -> Iterable[PodEnding]:
        if pod.ends_at is not None:
            yield PodEnding(f"Kubernetes deletes pod {pod.name}", pod.ends_at)
        node = self._nodes.get(pod.node)
        for key in () if node is None else node.ending:
            text, within_s = ENDING[key]
            at = None if within_s is None else self._tainted[pod.node, key] + within_s
            yield PodEnding(f"node {pod.node}: {text}", at)

    def _date(self, now: float) -> None:
        self._tainted = {
            (node.name, key): self._tainted.get((node.name, key), now)
            for node in self._nodes.values()
            for key in node.ending
        }


def _late(pod: Pod, now: float) -> bool:
    """Its node has ended it by now, or can't."""
    return pod.ends_at is not None and now >= pod.ends_at + OVERDUE_S


def differences(
    before: Mapping[str, PodEnding], after: Mapping[str, PodEnding]
) -> Iterable[tuple[str, PodEnding | None]]:
    """What is news: an end that is announced, or of which another time is said; None: it is off."""
    for host in before.keys() - after.keys():
        yield host, None
    for host, ending in after.items():
        if before.get(host) != ending:
            yield host, ending
