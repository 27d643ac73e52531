"""Discovery of the pods in one namespace that match a label selector, through a watch of the Kubernetes API.

Makes no decisions.

Each running pod is a host, named by its address. A pod that is being deleted, or whose node is about to end, remains a
host until it has ended, and the job is notified in advance. While the API server does not respond, the list does not
change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection

from elastic.driver.discovery.interface import Discovery, Log
from elastic.driver.discovery.kubernetes.api_client import (
    ApiError,
    ApiErrorKind,
    KubernetesApi,
    Resource,
)
from elastic.driver.discovery.kubernetes.api_objects import Pod
from elastic.driver.discovery.kubernetes.list_watch import (
    Changed,
    Listed,
    ListWatch,
    Update,
    WatchFailed,
)
from elastic.driver.discovery.kubernetes.pod_decisions import PodEnding, Pods, differences
from elastic.driver.events import Event, HostLeaving, HostsQueued, HostStaying, Notice
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.host_lists import show

ROLE = "list and watch of pods"
NODES_ROLE = "list and watch of nodes (a ClusterRole)"
NEEDED = {
    ApiErrorKind.FORBIDDEN: f"; grant {ROLE}",
    ApiErrorKind.UNAUTHORIZED: "; the token is read again at each attempt: does its service account still exist?",
}
MAX_LOGGED_HOSTS = 8  # maximum number of hosts per log line
DELETE_AGAIN_S = 30.0  # seconds between attempts to force the deletion of a pod


class PodDiscovery:
    """Discovery of pods as hosts. Calls ``noticed`` when the end of a host is announced.

    Args:
        notices: further taints and conditions that announce the end of a node.
        fallback: discovery to use if the API server does not authorize this service account to list pods.
    """

    def __init__(
        self,
        cluster: KubernetesApi,
        log: Log,
        *,
        noticed: Callable[[Event], None],
        slots: int | None = None,
        notices: Collection[str] = (),
        fallback: Discovery | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._log = log
        self._noticed = noticed
        self._pods = Pods(slots, notices)
        self._fallback = fallback
        self._now = now
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._hosts: dict[str, int] | None = None
        self._endings: dict[str, PodEnding] = {}
        self._queued = 0
        # time of the last attempt to force the deletion of each pod, by uid
        self._tried: dict[str, float] = {}
        # whether to force deletions; False once the API server has rejected one
        self._deletes = True
        self._listed = False
        self._refused = False
        self._asked: set[asyncio.Task[None]] = set()

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        loop = asyncio.get_running_loop()

        def enqueue(update: Update) -> None:
            loop.call_soon_threadsafe(self._updates.put_nowait, update)

        watches = [ListWatch(self._cluster, kind, enqueue) for kind in Resource]
        for each in watches:
            each.begin()
        try:
            while not self._refused:
                if self._listed:
                    self._count_queued()
                    hosts = self._pods.hosts(self._now())
                    if hosts != self._hosts:
                        self._introduce(hosts)
                        self._hosts = hosts
                        yield dict(hosts)
                    self._announce(hosts)
                    self._clean()
                await self._receive()
        finally:
            for each in watches:
                each.close()
        assert self._fallback is not None
        async for hosts in self._fallback.watch():
            yield hosts

    # ---- input -----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        due_s = self._pods.next_look(self._now())
        try:
            self._take(await within(self._updates.get(), due_s))
        except asyncio.TimeoutError:
            return
        while not self._updates.empty():  # combine simultaneous changes into one list
            self._take(self._updates.get_nowait())

    def _take(self, update: Update) -> None:
        now = self._now()
        match update:
            case Listed(Resource.PODS, objects):
                self._pods.listed(objects)
                self._listed = True
            case Listed(Resource.NODES, objects):
                self._pods.nodes_listed(objects, now)
            case Changed(Resource.PODS, object, deleted):
                self._pods.changed(object, deleted=deleted)
            case Changed(Resource.NODES, object, deleted):
                self._pods.node_changed(object, now, deleted=deleted)
            case WatchFailed(kind, error):
                self._trouble(kind, error)

    def _trouble(self, kind: Resource, error: ApiError | None) -> None:
        where = f"of namespace {self._cluster.namespace}"
        if kind is Resource.NODES:
            if error is not None and error.why is ApiErrorKind.FORBIDDEN:
                text = (
                    f"nodes are not watched: {error}; grant {NODES_ROLE}. Without it, taints of nodes are not"
                    " detected, only deleted pods"
                )
                self._log("info", text)
        elif error is None:
            self._log("info", f"the Kubernetes API answers requests for pods {where} again")
        else:
            forbidden = error.why is ApiErrorKind.FORBIDDEN
            self._refused = forbidden and self._fallback is not None and not self._listed
            kept = f"keeping {show(self._hosts)}" if self._hosts else "waiting for hosts"
            then = "using the name server instead" if self._refused else kept
            text = f"pods {where} can't be watched: {error}{NEEDED.get(error.why, '')}; {then}"
            self._log("warning", text)

    # ---- output ----------------------------------------------------------------------------------------------------

    def _introduce(self, hosts: dict[str, int]) -> None:
        """Log the pod names of new hosts, because other log lines contain only addresses."""
        new = [host for host in hosts if host not in (self._hosts or {})]
        if new:
            places = ", ".join(
                f"{host} is {self._pods.place_of(host)}" for host in new[:MAX_LOGGED_HOSTS]
            )
            more = f" and {len(new) - MAX_LOGGED_HOSTS} more" if len(new) > MAX_LOGGED_HOSTS else ""
            self._log("info", f"{places}{more}")

    def _count_queued(self) -> None:
        queued = self._pods.queued()
        if queued != self._queued:
            self._queued = queued
            self._noticed(HostsQueued(queued))

    def _announce(self, hosts: dict[str, int]) -> None:
        now = self._now()
        endings = self._pods.endings(now)
        for host, ending in differences(self._endings, endings):
            if ending is not None:
                left_s = None if ending.at is None else max(0.0, ending.at - now)
                self._noticed(HostLeaving(host, Notice(ending.text, left_s)))
            elif host in hosts:  # hosts that are not listed need no notification
                self._noticed(HostStaying(host))
        self._endings = endings

    def _clean(self) -> None:
        now = self._now()
        for pod in self._pods.overdue(now):
            if self._deletes and now - self._tried.get(pod.uid, 0.0) >= DELETE_AGAIN_S:
                self._tried[pod.uid] = now
                task = asyncio.ensure_future(self._delete(pod))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)

    async def _delete(self, pod: Pod) -> None:
        try:
            await asyncio.to_thread(self._cluster.delete_by_force, pod.name, pod.uid)
        except ApiError as error:
            refused = error.why is ApiErrorKind.FORBIDDEN
            self._deletes = self._deletes and not refused
            needs = "; grant delete of pods, or delete it by hand" if refused else ""
            text = f"pod {pod.name} of node {pod.node}, which does not respond, can't be deleted: {error}{needs}"
            self._log("warning", text)
        else:
            self._log("info", f"pod {pod.name} deleted: its node {pod.node} does not respond")
