"""Claims on a Ray cluster while nodes appear, drain and die, in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.driver.ray.placement_groups import (
    Claim,
    ClaimStage,
    Condition,
    PlacementGroupPool,
    held,
    same,
    shortage,
    suitable,
)
from harness.fake_ray import FakeRay
from harness.golden import recorded
from harness.refusals import refusal_of

ALIVE, DRAINING, DEAD = Condition.ALIVE, Condition.DRAINING, Condition.DEAD
UP = {"a": ALIVE, "b": ALIVE}


def on(node: str, *numbers: int) -> list[Claim]:
    return [Claim(number, ClaimStage.PLACED, node) for number in numbers]


def waiting(*numbers: int) -> list[Claim]:
    return [Claim(number, ClaimStage.WAITING) for number in numbers]


def missing(*numbers: int) -> list[Claim]:
    return [Claim(number, ClaimStage.GONE) for number in numbers]


# ---- one claim, one row of the table


def test_wanted_number_of_claims_is_made_at_first():
    claims = PlacementGroupPool(3)
    assert claims.decide([], UP).make == [0, 1, 2]
    decision = claims.decide(waiting(0, 1, 2), UP)
    assert (decision.seats, decision.make, decision.remove) == ({}, [], [])


def test_placed_claims_are_slots_and_unplaced_ones_are_awaited():
    decision = PlacementGroupPool(3).decide([*on("b", 1, 0), *waiting(2)], UP)
    assert (decision.seats, decision.make, decision.remove) == ({"b": [0, 1]}, [], [])
    assert decision.placed == 2


def test_node_of_the_oldest_claim_is_first_and_new_nodes_are_appended():
    claims = PlacementGroupPool(4)
    decision = claims.decide([*on("b", 1), *on("a", 2), *waiting(0, 3)], UP)
    assert list(decision.seats) == ["b", "a"]
    decision = claims.decide([*on("b", 1, 3), *on("a", 2, 0)], UP)
    assert list(decision.seats.items()) == [("b", [1, 3]), ("a", [2, 0])]


def test_draining_node_loses_its_claims_and_replacements_are_made_at_once():
    claims = PlacementGroupPool(3)
    claims.decide([*on("a", 0, 1), *on("b", 2)], UP)
    decision = claims.decide([*on("a", 0, 1), *on("b", 2)], {"a": DRAINING, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({"b": [2]}, [3, 4], [0, 1])
    assert decision.drained == ["a"]
    decision = claims.decide([*on("a", 0), *on("b", 2), *waiting(3, 4)], UP | {"a": DRAINING})
    assert (decision.make, decision.remove, decision.drained) == ([], [0], [])


def test_claim_to_be_removed_is_removed_after_moving_to_another_node():
    claims = PlacementGroupPool(1)
    claims.decide(on("a", 0), {"a": DRAINING, "b": ALIVE})
    decision = claims.decide([*on("b", 0), *waiting(1)], {"a": DEAD, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({}, [], [0])
    assert claims.decide([*missing(0), *on("b", 1)], UP).remove == []


def test_node_that_drained_once_never_has_slots_again():
    claims = PlacementGroupPool(1)
    claims.decide(on("a", 0), {"a": DRAINING, "b": ALIVE})
    decision = claims.decide([*missing(0), *on("a", 1)], UP)
    assert (decision.seats, decision.make, decision.remove) == ({}, [2], [1])


def test_claim_on_a_dead_node_is_kept_and_placed_elsewhere():
    claims = PlacementGroupPool(2)
    claims.decide([*on("a", 0), *on("b", 1)], UP)
    decision = claims.decide([*on("a", 0), *on("b", 1)], {"a": DEAD, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({"b": [1]}, [], [])
    assert claims.decide([*waiting(0), *on("b", 1)], {"a": DEAD, "b": ALIVE}).make == []
    decision = claims.decide([*on("b", 0, 1)], {"a": DEAD, "b": ALIVE})
    assert decision.seats == {"b": [1, 0]}  # the remaining claim keeps its slot


def test_unknown_node_has_no_slots():
    decision = PlacementGroupPool(1).decide(on("c", 0), UP)
    assert (decision.seats, decision.make, decision.remove) == ({}, [], [])


def test_claim_removed_externally_is_made_again_with_another_number():
    claims = PlacementGroupPool(2)
    claims.decide(on("a", 0, 1), UP)
    assert claims.decide([*missing(0), *on("a", 1)], UP).make == [2]
    # the number was not used, and is no longer reported
    assert claims.decide(on("a", 1), UP).make == [3]


def test_no_number_is_used_twice_even_across_drivers():
    assert PlacementGroupPool(2).decide([*missing(7), *waiting(3)], UP).make == [8]


def test_claims_with_other_requirements_belong_to_an_earlier_job():
    decision = PlacementGroupPool(2).decide(
        [Claim(0, ClaimStage.PLACED, "a", fits=False), *on("a", 1)], UP
    )
    assert (decision.seats, decision.make, decision.remove) == ({"a": [1]}, [2], [0])


def test_surplus_claims_are_removed_waiting_and_youngest_first():
    found = [*waiting(0), *on("a", 1, 2), *on("b", 3), *waiting(4)]
    assert PlacementGroupPool(4).decide(found, UP).remove == [4]
    for nodes, surplus in ((UP, [0, 3, 4]), ({"a": DEAD, "b": ALIVE}, [1, 2, 4])):
        claims = PlacementGroupPool(4)
        claims.decide(found, nodes)
        claims.want(2, {}, [])
        assert claims.decide(found, nodes).remove == surplus


def test_no_slot_is_given_up_before_the_driver_has_reported_its_workers():
    """The previous driver was scaled up beyond the initial size."""
    decision = PlacementGroupPool(1).decide([*on("a", 0, 1), *waiting(2)], UP)
    assert (decision.make, decision.remove) == ([], [2])
    claims = PlacementGroupPool(1)
    claims.want(1, {"a": 1}, [])  # the order of its slots is unknown
    assert claims.decide(on("a", 0, 1), UP).remove == []


def test_more_claims_are_made_when_more_are_wanted():
    claims = PlacementGroupPool(1)
    claims.decide(on("a", 0), UP)
    claims.want(3, {"a": 1}, [])
    decision = claims.decide(on("a", 0), UP)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [0]}, [1, 2], [])
    decision = claims.decide([*on("a", 0), *on("b", 1, 2)], UP)
    assert decision.seats == {"a": [0], "b": [1, 2]}


def test_scaling_down_removes_claims_without_a_worker_and_keeps_slots():
    claims = PlacementGroupPool(4)
    found = [*on("a", 0, 1), *on("b", 2, 3)]
    claims.decide(found, UP)
    claims.want(1, {"a": 2, "b": 1}, [])  # the worker in a's first slot has left, or is leaving
    decision = claims.decide(found, UP)
    assert (decision.seats, decision.remove) == ({"a": [0, 1], "b": [2]}, [3])
    claims.want(1, {"a": 2}, [])
    assert claims.decide([*on("a", 0, 1), *on("b", 2)], UP).seats == {"a": [0, 1]}


def test_drained_host_keeps_its_slots_and_replacements_are_requested():
    claims = PlacementGroupPool(2)
    found = [*on("a", 0), *on("b", 1)]
    claims.decide(found, UP)
    claims.want(2, {"a": 1}, ["b"])
    decision = claims.decide(found, UP)
    assert (decision.seats, decision.make) == ({"a": [0], "b": [1]}, [2])
    claims.want(2, {"a": 1}, [])  # not drained any more
    assert claims.decide([*found, *waiting(2)], UP).remove == [2]


def test_claim_is_no_slot_before_its_gpus_are_known():
    claims = PlacementGroupPool(2)
    found = [Claim(0, ClaimStage.PLACED, "a", ready=False), *on("a", 1)]
    assert claims.decide(found, UP).seats == {"a": [1]}
    assert claims.unready(found, UP)
    assert not claims.unready(found, {"a": DEAD})
    assert not claims.unready([*on("a", 0), *waiting(1)], UP)


@pytest.mark.parametrize(("found", "nodes"), [([], UP), (on("a", 0), {}), ([], {})])
def test_empty_answer_does_not_change_the_claims(found, nodes):
    claims = PlacementGroupPool(2)
    claims.decide([*on("a", 0), *waiting(1)], UP)
    decision = claims.decide(found, nodes)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [0]}, [], [])
    assert claims.decide([*on("a", 0), *on("b", 1)], UP).seats == {"a": [0], "b": [1]}


def test_bundles_of_a_foreign_group_are_neither_made_nor_removed():
    claims = PlacementGroupPool(2, ours=False)
    found = [*on("a", 1, 2), *on("b", 3)]
    decision = claims.decide(found, UP)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [1, 2]}, [], [])
    # One more than wanted replaces a lost one.
    decision = claims.decide(found, {"a": DRAINING, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({"b": [3]}, [], [])
    assert claims.decide(missing(1, 2, 3), UP).seats == {}


# ---- any events

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["drain", "kill", "take"]), st.integers(0, 5)),
        st.tuples(st.just("scale"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["tick", "look", "look", "mute", "fail", "restart"]), st.just(0)),
    ),
    max_size=40,
)


class Conversation:
    """Claims of a job on a cluster under random events. The invariants are asserted at every query."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ray = FakeRay(n0=2, n1=1)
        self.claims = PlacementGroupPool(most)
        self.seats: dict[str, list[int]] = {}
        self.drained: set[str] = set()

    def happen(self, event: str, index: int) -> None:
        ray = self.ray
        match event:
            case "add":
                ray.add(f"n{len(ray.table)}", index)
            case "drain" | "kill" if len(ray.table) > index:
                getattr(ray, event)(f"n{index}")
            case "take" if ray.live:  # removed by others
                victims = [g for g in ray.groups.values() if g.name in ray.live]
                victims[index % len(victims)].state = "REMOVED"
            case "tick":
                ray.tick()
            case "look":
                self.look()
            case "scale":
                self.look()
                self.most = index
                self.claims.want(index, {}, [])
                self.look()
            case "mute":
                last = self.seats
                self.decide([], {})
                assert self.seats == last
            case "fail":
                self.look(acts=False)
            case "restart":
                self.claims, self.seats = PlacementGroupPool(self.most), {}
                self.claims.decide(self.found(), self.conditions())
                self.claims.want(self.most, {}, [])
                self.look()

    def found(self) -> list[Claim]:
        return [
            Claim(
                int(group.name),
                ClaimStage.GONE
                if group.state == "REMOVED"
                else ClaimStage.PLACED
                if group.nodes[0]
                else ClaimStage.WAITING,
                group.nodes[0],
            )
            for group in self.ray.groups.values()
        ]

    def conditions(self) -> dict[str, Condition]:
        return {
            name: DEAD if not node.alive else DRAINING if node.draining else ALIVE
            for name, node in self.ray.table.items()
        }

    def decide(self, found: list[Claim], nodes: dict[str, Condition]):
        decision = self.claims.decide(found, nodes)
        stay = [node for node in self.seats if node in decision.seats]
        assert stay == [node for node in decision.seats if node in self.seats], (
            "their order is kept"
        )
        self.seats = decision.seats
        return decision

    def look(self, *, acts: bool = True) -> None:
        found, nodes = self.found(), self.conditions()
        decision = self.decide(found, nodes)
        if found:
            self.drained |= {node for node, is_ in nodes.items() if is_ is DRAINING}
            seated = {number: node for node, numbers in self.seats.items() for number in numbers}
            placed = {c.number: c.node for c in found if c.stage is ClaimStage.PLACED}
            assert decision.placed == len(seated) <= self.most
            for number, node in seated.items():
                assert placed[number] == node
                assert nodes[node] is ALIVE and node not in self.drained
        present = {claim.number for claim in found if claim.stage is not ClaimStage.GONE}
        assert set(decision.remove) <= present
        assert not set(decision.make) & {claim.number for claim in found}
        # No claim is leaked: the remaining ones are those wanted.
        assert len(present - set(decision.remove)) + len(decision.make) == self.most
        if acts:
            for number in decision.make:
                self.ray.make(str(number), {"CPU": 1}, {}, detached=False)
            for id, group in self.ray.groups.items():
                if int(group.name) in decision.remove:
                    self.ray.remove(id)

    def settle(self) -> None:
        """No further events."""
        for _ in range(4):
            self.look()
            self.ray.tick()
        self.look()


@given(st.integers(1, 5), EVENTS)
@settings(max_examples=3 * settings().max_examples)
def test_slots_never_exceed_the_maximum_and_no_claim_is_lost_for_any_events(most, events):
    conversation = Conversation(most)
    conversation.look()
    for event, index in events:
        conversation.happen(event, index)
    conversation.settle()
    ray = conversation.ray
    assert len(ray.live) == conversation.most
    room = sum(node.room for node in ray.table.values() if node.alive and not node.draining)
    seated = sum(len(numbers) for numbers in conversation.seats.values())
    assert seated == min(conversation.most, room)
    settled = conversation.seats
    conversation.look()
    assert conversation.seats == settled


# ---- bundles of a given group

ONE = {"CPU": 1.0}


def test_every_bundle_with_room_is_a_slot():
    bundles = {0: {"CPU": 1.0}, 1: {"CPU": 4.0, "GPU": 1.0}, 2: {"CPU": 0.5}}
    assert suitable(bundles, ONE) == [0, 1]
    assert suitable(bundles, {"CPU": 1, "GPU": 1}) == [1]
    assert suitable(bundles, {"CPU": 1, "GPU": 0}) == [0, 1]


def test_bundles_in_use_are_omitted():
    assert suitable({0: ONE, 1: ONE, 2: ONE}, ONE, {1: ONE}) == [0, 2]
    assert suitable({0: ONE, 1: ONE}, ONE, {0: {"CPU": 0.5}}) == [1]
    assert suitable({0: {"CPU": 2.0}, 1: ONE}, ONE, {0: ONE}) == [0, 1]
    assert suitable({0: ONE, 1: ONE}, ONE, {}) == [0, 1]


def test_resources_held_by_a_caller_are_found_by_their_names():
    ids = {
        "CPU": [(0, 9.0)],
        "CPU_group_aa": [(0, 1.0)],
        "CPU_group_1_aa": [(0, 1.0)],
        "GPU_group_1_aa": [(0, 0.5), (3, 1.0)],
        "my_group_2_aa": [(0, 2.0)],
        "CPU_group_0_bb": [(0, 1.0)],
        "bundle_group_aa": [(0, 0.001)],
        "bundle_group_0_aa": [(0, 0.001)],
    }
    assert held(ids, "aa") == {1: {"CPU": 1.0, "GPU": 1.5}, 2: {"my": 2.0}}
    assert held({"bundle_group_0_aa": [(0, 0.001)]}, "aa") == {}  # an actor without a CPU


@pytest.mark.parametrize("in_use", [{}, {1: {"CPU": 1}}, {1: {"CPU": 1}, 0: {"CPU": 0.5}}])
def test_group_without_a_suitable_bundle_is_rejected_with_its_bundles(in_use):
    recorded(
        "messages",
        refusal_of(
            suitable, {0: {"CPU": 1.0, "memory": 2e9}, 1: ONE}, {"GPU": 1, "CPU": 1}, in_use
        ),
    )


def test_equal_requirements_are_recognized():
    assert same({"CPU": 1, "GPU": 0}, {"CPU": 1.0})
    assert same({"CPU": 0.1}, {"CPU": 0.1 + 1e-9})
    assert not same({"CPU": 1}, {"CPU": 2})
    assert not same({"CPU": 1}, {"CPU": 1, "GPU": 0.5})


def test_shortage_names_request_resources_and_remedy():
    facts: dict[str, Any] = {
        "at_least": 4,
        "placed": 1,
        "within_s": 100.0,
        "resources": {"CPU": 1, "GPU": 1},
        "free": {"CPU": 3.0, "CPU_group_0": 9.0, "GPU": 0.0},
        "nodes": 2,
        "too_large": False,
        "given": False,
        "labels": {},
    }
    text = shortage(**facts)
    recorded("log", text)
    recorded("messages", shortage(**facts | {"too_large": True}))
    recorded("messages", shortage(**facts | {"free": {}, "nodes": 1}))
    recorded("messages", shortage(**facts | {"given": True}))
    labels = {"pool": "training", "ray.io/accelerator-type": "!L4"}
    recorded("messages", shortage(**facts | {"labels": labels, "too_large": True}))
