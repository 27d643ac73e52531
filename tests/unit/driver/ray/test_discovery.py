"""Discovery of hosts on a fake Ray cluster: yielded lists, requests to Ray, and log lines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from elastic.driver.discovery.interface import ResourceDemand
from elastic.driver.events import HostLeaving, Notice
from elastic.driver.network.blocking_calls import SequentialCalls
from elastic.driver.ray.cluster import RayUnavailable
from elastic.driver.ray.discovery import PAUSE_S, ClusterRequest, RayDiscovery, host_of
from elastic.errors import Invalid
from harness.fake_ray import FakeRay
from harness.golden import raises, recorded
from harness.refusals import refusal_of

ONE = {"CPU": 1.0}
GPU = {"CPU": 1.0, "GPU": 1.0}
A, B, C = "10.0.0.1-aaaa", "10.0.0.2-bbbb", "10.0.0.3-cccc"
Step = Callable[[], object]


class WatchedDiscovery:
    """A discovery on this cluster. ``watched`` returns what it yields while these steps run, one per pause."""

    def __init__(self, ray: FakeRay, wanted: ClusterRequest, **rest: Any) -> None:
        self.ray = ray
        self.told: list[Any] = []
        self.log: list[tuple[str, str]] = []
        self.now = 0.0
        self.steps: list[Step] = []
        rest = {"job": "j", "look_s": 1.0, "answer_s": 5.0, **rest}
        self.discovery = RayDiscovery(
            wanted,
            lambda level, text: self.log.append((level, text)),
            cluster=ray,
            clock=lambda: self.now,
            sleep=self.sleep,
            now=lambda: 1000.0 + self.now,
            **rest,
        )

    async def sleep(self, seconds: float) -> None:
        assert 1.0 <= seconds <= PAUSE_S  # longer after an expensive query
        self.now += 1.0
        if self.steps:
            self.steps.pop(0)()
        else:
            self.discovery._closing = True

    def watched(self, *steps: Step) -> list[list[tuple[str, int]]]:
        self.steps = list(steps)

        async def conversation() -> list[list[tuple[str, int]]]:
            return [list(hosts.items()) async for hosts in self.discovery.watch()]

        return asyncio.run(conversation())

    def place(self, at_least: int, within_s: float, *steps: Step) -> None:
        self.steps = [*steps, *[self.ray.tick] * 100]
        asyncio.run(self.discovery.place(at_least, within_s))

    @property
    def said(self) -> list[str]:
        return [text for _, text in self.log]


def nothing() -> None:
    """Let time pass."""


def started(*, most: int = 3, resources: dict[str, float] = ONE, **rooms: int) -> WatchedDiscovery:
    """Start a discovery, with every claim placed that fits."""
    bench = WatchedDiscovery(FakeRay(**rooms), ClusterRequest(most, resources))
    bench.place(min(most, sum(rooms.values())), 10)
    bench.ray.said.clear()
    return bench


def test_requested_number_of_claims_is_made_and_placed_ones_are_listed():
    bench = WatchedDiscovery(FakeRay(aaaa=1, bbbb=1), ClusterRequest(3, ONE))
    assert bench.watched(bench.ray.tick, nothing) == [[], [(A, 1), (B, 1)]]
    assert bench.ray.said == ["make 0", "make 1", "make 2"]
    assert set(bench.ray.live) == {"hvd-elastic:j:0", "hvd-elastic:j:1", "hvd-elastic:j:2"}
    assert bench.discovery.node_of(B) == "bbbb"
    assert bench.discovery.gpus_of(A) == []
    assert bench.log == []


def test_claims_are_made_with_the_label_selector():
    wanted = ClusterRequest(2, ONE, labels={"pool": "training"})
    bench = WatchedDiscovery(FakeRay(aaaa=2), wanted)
    bench.watched(bench.ray.tick, nothing)
    assert bench.ray.said == ["make 0 on pool=training", "make 1 on pool=training"]


def test_new_node_receives_waiting_claims():
    bench = started(aaaa=1)
    lists = bench.watched(lambda: bench.ray.add("bbbb", 5), bench.ray.tick, nothing)
    assert lists == [[(A, 1)], [(A, 1), (B, 2)]]
    assert bench.ray.said == []


async def test_draining_node_is_unlisted_before_its_claims_are_removed():
    bench = await asyncio.to_thread(started, aaaa=2, bbbb=1, cccc=2)  # in its own event loop
    ray, removed_at = bench.ray, []
    bench.steps = [lambda: ray.drain("aaaa"), ray.tick, nothing]
    async for hosts in bench.discovery.watch():
        removed_at.append((list(hosts.items()), list(ray.said)))
    made = ["make 3", "make 4"]
    assert removed_at == [
        ([(A, 2), (B, 1)], []),
        ([(B, 1)], made),
        ([(B, 1), (C, 2)], [*made, "remove 0", "remove 1"]),
    ]
    assert bench.log == [("info", f"{A} drains: its workers leave, and replacements are requested")]


def test_drain_with_a_deadline_is_one_notice_with_the_remaining_time():
    bench = started(aaaa=1, bbbb=1, cccc=1)
    bench.discovery.follow(lambda: ResourceDemand(3), bench.told.append)
    drain = bench.ray.drain
    bench.watched(
        lambda: drain("aaaa", 1000.0 + bench.now + 60.0), nothing, lambda: drain("bbbb"), nothing
    )
    assert bench.told == [HostLeaving(A, Notice("Ray drains its node", 60.0))]


def test_dead_node_loses_its_slots_and_ray_places_its_claims_elsewhere():
    bench = started(aaaa=1, bbbb=5)
    lists = bench.watched(lambda: bench.ray.kill("aaaa"), bench.ray.tick, nothing)
    assert lists == [[(A, 1), (B, 2)], [(B, 2)], [(B, 3)]]
    assert bench.ray.said == []
    assert bench.discovery.node_of(A) == "aaaa"


def test_ray_outage_does_not_change_the_hosts_and_is_logged_once():
    bench = started(aaaa=1, bbbb=2)
    ray = bench.ray

    def trouble(text: str) -> Step:
        return lambda: setattr(ray, "trouble", text)

    down = "RpcError: unavailable"
    lists = bench.watched(
        trouble(down), nothing, trouble(""), nothing, lambda: ray.kill("bbbb"), nothing
    )
    assert lists == [[(A, 1), (B, 2)], [(A, 1)]]
    assert bench.log == [
        ("warning", f"Ray could not be queried: {down}; keeping {A}:1,{B}:2"),
        ("info", "Ray answers again"),
    ]


def test_restarted_ray_without_state_does_not_change_the_hosts():
    bench = started(aaaa=1, bbbb=2)
    groups, nodes = bench.ray.groups, bench.ray.table

    def forget() -> None:
        bench.ray.groups, bench.ray.table = {}, {}

    def remember() -> None:
        bench.ray.groups, bench.ray.table = groups, nodes

    assert bench.watched(forget, nothing, remember, nothing) == [[(A, 1), (B, 2)]]
    assert [level for level, _ in bench.log] == ["warning", "info"]
    assert bench.ray.said == []


def test_successor_driver_finds_the_claims_and_duplicates_none():
    bench = started(aaaa=1, bbbb=2)
    other = WatchedDiscovery(bench.ray, ClusterRequest(4, ONE), detached=True)
    assert other.watched(nothing) == [[(A, 1), (B, 2)]]
    recorded("log", other.ray.said)


def test_number_of_claims_follows_the_drivers_need():
    bench = started(most=1, aaaa=1, bbbb=2)
    needs = [
        ResourceDemand(1, {A: 1}),
        ResourceDemand(3, {A: 1}),
        ResourceDemand(3, {A: 1}),
        ResourceDemand(2, {A: 1, B: 1}),
    ]
    bench.discovery.follow(lambda: needs.pop(0) if len(needs) > 1 else needs[0], bench.told.append)
    lists = bench.watched(bench.ray.tick, bench.ray.tick, bench.ray.tick, nothing)
    assert lists == [[(A, 1)], [(A, 1), (B, 2)], [(A, 1), (B, 1)]]
    assert bench.ray.said == ["make 1", "make 2", "remove 2"]


def test_drained_host_stays_and_replacements_are_requested():
    bench = started(most=1, aaaa=1, bbbb=2)
    bench.discovery.follow(lambda: ResourceDemand(1, {A: 1}, [A]), bench.told.append)
    assert bench.watched(bench.ray.tick, nothing) == [[(A, 1)], [(A, 1), (B, 1)]]


def test_claims_of_other_jobs_are_not_removed():
    ray = FakeRay(aaaa=9)
    for name in ("hvd-elastic:j2:0", "hvd-elastic:j:5:0", "hvd-elastic:j:x", "mine"):
        ray.make(name, ONE, {}, detached=False)
    others = set(ray.live)
    bench = WatchedDiscovery(ray, ClusterRequest(2, ONE))
    bench.place(2, 10)
    asyncio.run(bench.discovery.close())
    assert set(ray.live) == others


def test_different_claims_of_an_earlier_job_are_removed():
    ray = FakeRay(aaaa=3)
    ray.make("hvd-elastic:j:0", {"CPU": 2}, {}, detached=True)
    ray.said.clear()
    bench = WatchedDiscovery(ray, ClusterRequest(1, ONE))
    bench.place(1, 10)
    assert ray.said == ["make 1", "remove 0"]


# ---- GPUs


def test_gpus_of_a_host_are_reported_in_the_order_of_its_slots():
    bench = started(most=4, resources=GPU, aaaa=2)
    assert bench.discovery.gpus_of(A) == ["aaaa000.0", "aaaa010.0"]
    bench.ray.table["aaaa"].room = 3
    assert bench.watched(bench.ray.tick, nothing)[-1] == [(A, 3)]
    assert bench.discovery.gpus_of(A) == ["aaaa000.0", "aaaa010.0", "aaaa020.0"]
    assert bench.discovery.gpus_of("nowhere") == []


def test_slot_with_several_gpus_has_all_of_its_gpus():
    bench = started(most=1, resources={"GPU": 2}, aaaa=1)
    assert bench.discovery.gpus_of(A) == ["aaaa000.0,aaaa000.1"]


def test_slot_is_listed_once_its_gpus_are_known():
    ray = FakeRay(aaaa=1)
    bench = WatchedDiscovery(ray, ClusterRequest(1, GPU))
    ray.gpus_known = False

    def known() -> None:
        ray.gpus_known = True

    assert bench.watched(ray.tick, nothing, known, nothing) == [[], [(A, 1)]]


def test_first_list_of_a_successor_waits_a_limited_time_for_completeness():
    bench = started(most=1, resources=GPU, aaaa=1)
    ray = bench.ray
    ray.gpus_known = False

    def known() -> None:
        ray.gpus_known = True

    assert WatchedDiscovery(ray, ClusterRequest(1, GPU)).watched(nothing, known, nothing) == [
        [(A, 1)]
    ]
    ray.gpus_known = False
    late = WatchedDiscovery(ray, ClusterRequest(1, GPU))
    assert late.watched(*[nothing] * 10) == []
    assert WatchedDiscovery(ray, ClusterRequest(1, GPU)).watched(*[nothing] * 12) == [[]]


def test_no_list_is_yielded_before_ray_has_answered():
    bench = started(aaaa=1)
    bench.ray.trouble = "down"
    assert WatchedDiscovery(bench.ray, ClusterRequest(1, ONE)).watched(*[nothing] * 20) == []


def test_unknown_gpus_are_logged(monkeypatch):
    bench = started(most=1, resources=GPU, aaaa=1)

    def fails(*_: object) -> None:
        raise RayUnavailable("no module named elastic")

    monkeypatch.setattr(bench.ray, "gpus", fails)
    assert bench.watched(nothing, nothing) == [[(A, 1)]]  # known values are not queried again
    assert bench.log == []
    other = WatchedDiscovery(bench.ray, ClusterRequest(1, GPU))
    assert other.watched(*[nothing] * 12) == [[]]
    recorded("log", other.said[0])
    assert len(other.log) == 1


def test_ray_that_does_not_report_drains_is_logged_once():
    bench = WatchedDiscovery(FakeRay(aaaa=1), ClusterRequest(1, ONE))
    bench.ray.tells_drains = False
    bench.ray.drain("aaaa")
    bench.watched(nothing, nothing)
    assert [level for level, _ in bench.log] == ["warning"]
    recorded("log", bench.said[0])


# ---- placement


def test_placement_returns_once_enough_claims_are_placed():
    bench = WatchedDiscovery(FakeRay(aaaa=1, bbbb=1), ClusterRequest(5, ONE))
    bench.place(2, 10)
    assert bench.now == 1.0
    assert len(bench.ray.live) == 5
    assert bench.log == []


def test_waiting_for_room_is_logged():
    bench = WatchedDiscovery(FakeRay(aaaa=1), ClusterRequest(2, ONE))
    bench.place(2, 60, *[bench.ray.tick] * 9, lambda: bench.ray.add("bbbb", 1))
    assert bench.log == [
        (
            "info",
            "waiting for resources on the Ray cluster: 1 of 2 workers of CPU 1 each were placed",
        )
    ]


def test_missing_room_is_an_error_with_the_resources_and_removes_the_claims():
    bench = WatchedDiscovery(FakeRay(aaaa=1, bbbb=1), ClusterRequest(4, {"CPU": 99}))
    recorded("messages", refusal_of(bench.place, 4, 10))
    assert bench.ray.live == {}


def test_ray_outage_during_placement_is_reported():
    bench = WatchedDiscovery(FakeRay(aaaa=1), ClusterRequest(1, ONE))
    bench.ray.trouble = "RpcError: unavailable"
    with raises(Invalid):
        bench.place(1, 3)
    [(_, first), (_, last)] = bench.log
    recorded("messages", first)
    recorded("messages", last)


def test_missing_gpus_are_reported():
    bench = WatchedDiscovery(FakeRay(aaaa=1), ClusterRequest(1, GPU))
    bench.ray.gpus_known = False
    with raises(Invalid):
        bench.place(1, 3)


# ---- the caller's placement group


def in_group(*bundles: dict[str, float], most: int = 9, **rest: Any) -> WatchedDiscovery:
    ray = FakeRay(aaaa=2, bbbb=2)
    wanted = ClusterRequest(most, ONE, ray.given(*bundles), **rest)
    return WatchedDiscovery(ray, wanted)


def test_bundles_of_a_group_are_the_slots_and_stay_after_the_end():
    bench = in_group(ONE, {"CPU": 0.5}, ONE, ONE, in_use={0: ONE})
    bench.place(2, 10)
    assert bench.watched(nothing) == [[(B, 2)]]
    asyncio.run(bench.discovery.close())
    assert bench.ray.groups["aa"].state == "CREATED"
    assert bench.ray.said == []


def test_bundle_on_a_draining_node_is_no_slot_and_is_not_removed():
    bench = in_group(ONE, ONE, ONE)
    bench.place(3, 10)
    assert bench.watched(lambda: bench.ray.drain("aaaa"), nothing) == [[(A, 2), (B, 1)], [(B, 1)]]
    assert bench.ray.said == []


def test_remaining_bundles_stay_slots_while_ray_places_lost_ones():
    bench = in_group(ONE, ONE, ONE, ONE)
    bench.place(4, 10)
    ray = bench.ray
    assert bench.watched(lambda: ray.kill("aaaa"), ray.tick, nothing) == [
        [(A, 2), (B, 2)],
        [(B, 2)],
    ]
    assert ray.groups["aa"].state == "RESCHEDULING"


def test_removed_group_has_no_slots():
    bench = in_group(ONE)
    bench.place(1, 10)
    assert bench.watched(lambda: bench.ray.remove("aa"), nothing) == [[(A, 1)], []]


def test_group_without_a_suitable_bundle_is_rejected_at_once():
    bench = in_group({"CPU": 0.5})
    with raises(Invalid):
        bench.place(1, 100)
    assert bench.now == 0.0


def test_group_that_is_too_small_is_rejected_with_the_reason():
    bench = in_group(ONE, ONE)
    with raises(Invalid):
        bench.place(3, 3)


# ---- the end


async def test_closing_removes_every_claim_and_ends_the_watch():
    bench = await asyncio.to_thread(started, most=5, aaaa=1, bbbb=2)
    watching = bench.discovery.watch()
    await anext(watching)
    await bench.discovery.close()
    assert [hosts async for hosts in watching] == []
    assert bench.ray.live == {}
    assert bench.log == []


async def closed_while_it_places(
    bench: WatchedDiscovery, hangs: threading.Event, go_on: threading.Event
) -> None:
    """Ray hangs in a call during placement, which ends once the discovery is being closed."""
    placing = asyncio.create_task(bench.discovery.place(2, 100))
    await asyncio.to_thread(hangs.wait, 10)
    closing = asyncio.create_task(bench.discovery.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    placing.cancel()
    await asyncio.wait({placing})


async def test_query_in_progress_makes_no_claim_after_close():
    bench = WatchedDiscovery(FakeRay(aaaa=1), ClusterRequest(2, ONE), answer_s=0.05)
    ray, go_on, told_of = bench.ray, threading.Event(), threading.Event()
    claims = ray.claims

    def hangs(prefix: str) -> Any:
        told_of.set()
        go_on.wait(10)
        return claims(prefix)

    ray.claims = hangs  # type: ignore[method-assign]
    await closed_while_it_places(bench, told_of, go_on)
    assert ray.live == {} and ray.said == []


async def test_closing_during_placement_removes_the_claims_already_made():
    bench = WatchedDiscovery(FakeRay(aaaa=1), ClusterRequest(3, ONE))
    ray, go_on, begun = bench.ray, threading.Event(), threading.Event()
    make = ray.make

    def hangs(name: str, bundle: Any, labels: Any, *, detached: bool) -> None:
        begun.set()
        assert go_on.wait(10)
        make(name, bundle, labels, detached=detached)

    ray.make = hangs  # type: ignore[method-assign]
    await closed_while_it_places(bench, begun, go_on)
    assert ray.said == ["make 0", "remove 0"]


# ---- blocking calls


def test_hanging_call_is_logged_and_no_further_calls_are_queued():
    bench = started(aaaa=1)
    ray, go_on, calls = bench.ray, threading.Event(), []
    nodes = ray.nodes

    def hangs() -> Any:
        calls.append(1)
        assert go_on.wait(10)
        return nodes()

    slow = WatchedDiscovery(ray, ClusterRequest(1, ONE), answer_s=0.02)
    ray.nodes = hangs  # type: ignore[method-assign]
    assert slow.watched(nothing, nothing, go_on.set, nothing, nothing) == [[(A, 1)]]
    assert len(calls) < 5
    [(_, late), (_, over)] = slow.log
    recorded("messages", late)
    recorded("messages", over)


async def test_calls_run_sequentially_and_their_errors_are_raised():
    inside: list[int] = []

    def call(value: int) -> Callable[[], int]:
        def run() -> int:
            inside.append(value)
            assert len(inside) == 1, "another one runs"
            inside.remove(value)
            if value == 3:
                raise Invalid("three")
            return value

        return run

    calls = SequentialCalls("test")
    got = await asyncio.gather(*(calls(call(n), 10) for n in range(5)), return_exceptions=True)
    assert [got[n] for n in (0, 1, 2, 4)] == [0, 1, 2, 4]
    assert isinstance(got[3], Invalid)


# ---- requirements


@pytest.mark.parametrize(
    ("most", "resources"),
    [
        (0, ONE),
        (1, {}),
        (1, {"CPU": 0}),
        (1, {"CPU": -1}),
        (1, {"CPU": float("nan")}),
        (1, {"CPU": "1"}),
        (1, {"GPU": 1.5}),
    ],
)
def test_invalid_requirements_are_rejected(most, resources):
    recorded("messages", refusal_of(ClusterRequest, most, resources))


def test_host_is_named_by_address_and_node():
    assert host_of("10.0.0.7", "0cafdea9ba12644a") == "10.0.0.7-0cafdea9"
