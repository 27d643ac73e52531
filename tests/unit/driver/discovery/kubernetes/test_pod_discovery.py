"""Discovery of pods: hosts, their announced ends, and one log line for each failure."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import create_autospec

from elastic.driver.discovery.kubernetes.api_client import (
    ApiClient,
    ApiError,
    ApiErrorKind,
    Resource,
)
from elastic.driver.discovery.kubernetes.pod_discovery import PodDiscovery
from elastic.driver.discovery.static import StaticDiscovery
from elastic.driver.events import HostLeaving, HostsQueued, HostStaying, Notice
from elastic.driver.network.blocking_calls import within
from harness.golden import recorded
from harness.kubernetes_objects import node, pod

A, B = "10.0.0.6", "10.0.0.7"
FORBIDDEN = ApiError(ApiErrorKind.FORBIDDEN, "HTTP 403")
SPOT = "aws-node-termination-handler/spot-itn"


class Stage:
    """A cluster with given answers, and the discovery that queries it. ``lists`` and ``log`` grow."""

    def __init__(self, *pods: Any, fallback: Any = None, refused: Sequence[Resource] = ()) -> None:
        self.answers: dict[Resource, queue.Queue[Any]] = {kind: queue.Queue() for kind in Resource}
        self.lists: list[dict[str, int]] = []
        self.log: list[tuple[str, str]] = []
        self.told: list[Any] = []
        self.now = 100.0
        self.cluster = create_autospec(ApiClient, instance=True)
        self.cluster.namespace = "lab"
        self.refused = refused
        listed = {Resource.PODS: [*pods], Resource.NODES: [node("n1"), node("n2")]}

        def everything(kind: Resource) -> Any:
            if kind in self.refused:
                raise FORBIDDEN
            return listed[kind], "7"

        self.cluster.all.side_effect = everything
        self.cluster.events.side_effect = lambda kind, version: iter(self.answers[kind].get, None)
        self.discovery = PodDiscovery(
            self.cluster,
            lambda level, text: self.log.append((level, text)),
            noticed=self.told.append,
            fallback=fallback,
            now=lambda: self.now,
        )

    def change(self, object: Any, kind: Resource = Resource.PODS, how: str = "MODIFIED") -> None:
        self.answers[kind].put({"type": how, "object": object})

    def play(self, play: Callable[[], Awaitable[None]]) -> None:
        async def played() -> None:
            async def listen() -> None:
                async for hosts in self.discovery.watch():
                    self.lists.append(hosts)

            listening = asyncio.ensure_future(listen())
            try:
                await play()
            finally:
                listening.cancel()
                await asyncio.wait({listening})
                for answers in self.answers.values():
                    answers.put(None)

        asyncio.run(played())

    async def until(self, true: Callable[[], Any]) -> None:
        async def looking() -> None:
            while not true():
                await asyncio.sleep(0)

        await within(looking(), 5.0)


def test_pods_are_added_and_removed_and_logged_with_their_names():
    stage = Stage(pod("w-0", A))

    async def play() -> None:
        await stage.until(lambda: stage.lists == [{A: 1}])
        stage.change(pod("w-1", B, node="n2"), how="ADDED")
        await stage.until(lambda: len(stage.lists) == 2)
        stage.change(pod("w-0", A), how="DELETED")
        await stage.until(lambda: len(stage.lists) == 3)

    stage.play(play)
    assert stage.lists == [{A: 1}, {A: 1, B: 1}, {B: 1}]
    recorded("log", [text for _, text in stage.log])
    assert stage.told == []


def test_deletion_is_one_notice_with_the_remaining_time():
    stage = Stage(pod("w-0", A), pod("w-1", B))

    async def play() -> None:
        stage.change(pod("w-0", A, ends_at=130))
        await stage.until(lambda: stage.told)
        stage.change(pod("w-0", A, ends_at=130), how="DELETED")
        await stage.until(lambda: stage.lists[-1] == {B: 1})

    stage.play(play)
    assert stage.told == [HostLeaving(A, Notice("Kubernetes deletes pod w-0", 30.0))]


def test_changes_of_the_number_of_queued_pods_are_reported_once():
    gated: dict[str, Any] = {"phase": "Pending", "gates": ("kueue.x-k8s.io/admission",)}
    stage = Stage(pod("w-0", **gated), pod("w-1", **gated))

    async def play() -> None:
        await stage.until(lambda: stage.lists == [{}])
        stage.change(pod("w-0", phase="Pending"))
        await stage.until(lambda: len(stage.told) == 2)
        stage.change(pod("w-0", A))
        await stage.until(lambda: stage.lists[-1] == {A: 1})
        stage.change(pod("w-1", B))
        await stage.until(lambda: len(stage.told) == 3)

    stage.play(play)
    assert stage.told == [HostsQueued(2), HostsQueued(1), HostsQueued(0)]


def test_taint_is_a_notice_that_ends_with_the_taint():
    stage = Stage(pod("w-0", A))

    async def play() -> None:
        await stage.until(lambda: stage.lists)
        stage.change(node("n1", taints=(SPOT,)), Resource.NODES)
        await stage.until(lambda: stage.told)
        stage.change(node("n1"), Resource.NODES)
        await stage.until(lambda: len(stage.told) == 2)

    stage.play(play)
    notice = Notice("node n1: its spot instance is being reclaimed", 120.0)
    assert stage.told == [HostLeaving(A, notice), HostStaying(A)]


def test_pod_stuck_on_a_lost_node_is_deleted_by_force():
    stage = Stage(pod("w-0", A, ends_at=90, uid="u0"), pod("w-1", B, node="n2"))

    async def play() -> None:
        await stage.until(lambda: stage.lists == [{B: 1}])
        assert not stage.cluster.delete_by_force.called
        stage.change(node("n1", ready="Unknown"), Resource.NODES)
        await stage.until(lambda: len(stage.log) == 2)

    stage.play(play)
    stage.cluster.delete_by_force.assert_called_once_with("w-0", "u0")
    recorded("log", stage.log[-1])


def test_missing_permission_to_delete_is_logged_once():
    stage = Stage(pod("w-0", A, ends_at=90), pod("w-1", B, node="n2"))
    stage.cluster.delete_by_force.side_effect = FORBIDDEN

    async def play() -> None:
        stage.change(node("n1", ready="Unknown"), Resource.NODES)
        await stage.until(lambda: any(level == "warning" for level, _ in stage.log))
        stage.now += 1000
        stage.change(pod("w-1", B, node="n2", phase="Failed"))
        await stage.until(lambda: stage.lists[-1] == {})

    stage.play(play)
    assert stage.cluster.delete_by_force.call_count == 1
    recorded("log", stage.log[-1][1])


def test_missing_permission_to_list_pods_is_logged_and_the_name_server_used():
    stage = Stage(fallback=StaticDiscovery({"10.9.9.9": 1}), refused=[Resource.PODS])

    async def play() -> None:
        await stage.until(lambda: stage.lists)

    stage.play(play)
    assert stage.lists == [{"10.9.9.9": 1}]
    assert stage.log == [
        (
            "warning",
            "pods of namespace lab can't be watched: this service account is not authorized (HTTP 403); grant list and"
            " watch of pods; using the name server instead",
        )
    ]


def test_missing_permission_to_watch_nodes_is_logged_once():
    stage = Stage(pod("w-0", A), refused=[Resource.NODES])

    async def play() -> None:
        await stage.until(lambda: stage.lists and len(stage.log) == 2)

    stage.play(play)
    assert stage.lists == [{A: 1}]
    recorded("log", stage.log)


def test_outage_of_the_api_server_does_not_change_the_hosts():
    stage = Stage(pod("w-0", A))

    async def play() -> None:
        await stage.until(lambda: stage.lists)
        stage.cluster.events.side_effect = ApiError(ApiErrorKind.UNREACHABLE, "refused")
        stage.answers[Resource.PODS].put(None)
        await stage.until(lambda: len(stage.log) == 2)

    stage.play(play)
    assert stage.lists == [{A: 1}]
    warning = f"pods of namespace lab can't be watched: it is unreachable (refused); keeping {A}:1"
    assert stage.log[-1] == ("warning", warning)
