"""Claims on a Ray cluster: what becomes of them as nodes come, drain and die, whatever the order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.driver.ray.placement_groups import (
    Claim,
    Claims,
    ClaimStage,
    Condition,
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


def gone(*numbers: int) -> list[Claim]:
    return [Claim(number, ClaimStage.GONE) for number in numbers]


# ---- one claim, one row of the table


def test_at_first_as_many_are_made_as_are_wanted():
    claims = Claims(3)
    assert claims.decide([], UP).make == [0, 1, 2]
    decision = claims.decide(waiting(0, 1, 2), UP)
    assert (decision.seats, decision.make, decision.remove) == ({}, [], [])


def test_those_that_are_placed_are_slots_and_the_others_are_waited_for():
    decision = Claims(3).decide([*on("b", 1, 0), *waiting(2)], UP)
    assert (decision.seats, decision.make, decision.remove) == ({"b": [0, 1]}, [], [])
    assert decision.placed == 2


def test_the_node_of_the_oldest_comes_first_and_those_that_come_later_stand_behind():
    claims = Claims(4)
    decision = claims.decide([*on("b", 1), *on("a", 2), *waiting(0, 3)], UP)
    assert list(decision.seats) == ["b", "a"]
    decision = claims.decide([*on("b", 1, 3), *on("a", 2, 0)], UP)
    assert list(decision.seats.items()) == [("b", [1, 3]), ("a", [2, 0])]


def test_a_node_that_drains_loses_its_claims_and_others_are_made_at_once():
    claims = Claims(3)
    claims.decide([*on("a", 0, 1), *on("b", 2)], UP)
    decision = claims.decide([*on("a", 0, 1), *on("b", 2)], {"a": DRAINING, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({"b": [2]}, [3, 4], [0, 1])
    assert decision.drained == ["a"]
    decision = claims.decide([*on("a", 0), *on("b", 2), *waiting(3, 4)], UP | {"a": DRAINING})
    assert (decision.make, decision.remove, decision.drained) == ([], [0], [])


def test_a_claim_that_is_to_go_is_removed_wherever_it_is_placed_meanwhile():
    claims = Claims(1)
    claims.decide(on("a", 0), {"a": DRAINING, "b": ALIVE})
    decision = claims.decide([*on("b", 0), *waiting(1)], {"a": DEAD, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({}, [], [0])
    assert claims.decide([*gone(0), *on("b", 1)], UP).remove == []


def test_a_node_that_drained_once_never_has_slots_again():
    claims = Claims(1)
    claims.decide(on("a", 0), {"a": DRAINING, "b": ALIVE})
    decision = claims.decide([*gone(0), *on("a", 1)], UP)
    assert (decision.seats, decision.make, decision.remove) == ({}, [2], [1])


def test_the_claim_on_a_dead_node_is_kept_and_ray_places_it_elsewhere():
    claims = Claims(2)
    claims.decide([*on("a", 0), *on("b", 1)], UP)
    decision = claims.decide([*on("a", 0), *on("b", 1)], {"a": DEAD, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({"b": [1]}, [], [])
    assert claims.decide([*waiting(0), *on("b", 1)], {"a": DEAD, "b": ALIVE}).make == []
    decision = claims.decide([*on("b", 0, 1)], {"a": DEAD, "b": ALIVE})
    assert decision.seats == {"b": [1, 0]}  # who was there keeps its slot


def test_a_node_that_is_not_known_yet_has_no_slots():
    decision = Claims(1).decide(on("c", 0), UP)
    assert (decision.seats, decision.make, decision.remove) == ({}, [], [])


def test_a_claim_that_somebody_else_removed_is_made_anew_under_another_number():
    claims = Claims(2)
    claims.decide(on("a", 0, 1), UP)
    assert claims.decide([*gone(0), *on("a", 1)], UP).make == [2]
    assert claims.decide(on("a", 1), UP).make == [3]  # it was not made, nor is it told any more


def test_no_number_is_used_twice_though_another_driver_used_it():
    assert Claims(2).decide([*gone(7), *waiting(3)], UP).make == [8]


def test_what_asks_for_something_else_was_left_by_an_earlier_job():
    decision = Claims(2).decide([Claim(0, ClaimStage.PLACED, "a", fits=False), *on("a", 1)], UP)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [1]}, [2], [0])


def test_of_more_than_are_wanted_those_that_wait_go_first_and_the_youngest_of_them():
    found = [*waiting(0), *on("a", 1, 2), *on("b", 3), *waiting(4)]
    assert Claims(4).decide(found, UP).remove == [4]
    for nodes, surplus in ((UP, [0, 3, 4]), ({"a": DEAD, "b": ALIVE}, [1, 2, 4])):
        claims = Claims(4)
        claims.decide(found, nodes)
        claims.want(2, {}, [])
        assert claims.decide(found, nodes).remove == surplus


def test_before_its_driver_has_said_who_runs_no_place_is_given_up():
    """The driver before this one was asked for more than the job began with."""
    decision = Claims(1).decide([*on("a", 0, 1), *waiting(2)], UP)
    assert (decision.make, decision.remove) == ([], [2])
    claims = Claims(1)
    claims.want(1, {"a": 1}, [])  # nothing is known of the order of its slots
    assert claims.decide(on("a", 0, 1), UP).remove == []


def test_more_are_made_as_more_are_wanted():
    claims = Claims(1)
    claims.decide(on("a", 0), UP)
    claims.want(3, {"a": 1}, [])
    decision = claims.decide(on("a", 0), UP)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [0]}, [1, 2], [])
    decision = claims.decide([*on("a", 0), *on("b", 1, 2)], UP)
    assert decision.seats == {"a": [0], "b": [1, 2]}


def test_as_fewer_are_wanted_those_without_a_worker_go_and_nobody_changes_its_slot():
    claims = Claims(4)
    found = [*on("a", 0, 1), *on("b", 2, 3)]
    claims.decide(found, UP)
    claims.want(1, {"a": 2, "b": 1}, [])  # the worker of a's first slot has left, or leaves
    decision = claims.decide(found, UP)
    assert (decision.seats, decision.remove) == ({"a": [0, 1], "b": [2]}, [3])
    claims.want(1, {"a": 2}, [])
    assert claims.decide([*on("a", 0, 1), *on("b", 2)], UP).seats == {"a": [0, 1]}


def test_a_host_that_an_operator_drains_keeps_its_places_and_others_are_asked_for():
    claims = Claims(2)
    found = [*on("a", 0), *on("b", 1)]
    claims.decide(found, UP)
    claims.want(2, {"a": 1}, ["b"])
    decision = claims.decide(found, UP)
    assert (decision.seats, decision.make) == ({"a": [0], "b": [1]}, [2])
    claims.want(2, {"a": 1}, [])  # no longer
    assert claims.decide([*found, *waiting(2)], UP).remove == [2]


def test_a_claim_is_no_slot_before_all_is_known_about_it():
    claims = Claims(2)
    found = [Claim(0, ClaimStage.PLACED, "a", ready=False), *on("a", 1)]
    assert claims.decide(found, UP).seats == {"a": [1]}
    assert claims.unready(found, UP)
    assert not claims.unready(found, {"a": DEAD})
    assert not claims.unready([*on("a", 0), *waiting(1)], UP)


@pytest.mark.parametrize(("found", "nodes"), [([], UP), (on("a", 0), {}), ([], {})])
def test_an_answer_that_holds_nothing_changes_nothing(found, nodes):
    claims = Claims(2)
    claims.decide([*on("a", 0), *waiting(1)], UP)
    decision = claims.decide(found, nodes)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [0]}, [], [])
    assert claims.decide([*on("a", 0), *on("b", 1)], UP).seats == {"a": [0], "b": [1]}


def test_bundles_of_somebody_elses_group_are_neither_made_nor_removed():
    claims = Claims(2, ours=False)
    found = [*on("a", 1, 2), *on("b", 3)]
    decision = claims.decide(found, UP)
    assert (decision.seats, decision.make, decision.remove) == ({"a": [1, 2]}, [], [])
    # One more than is wanted takes the place of one that is lost.
    decision = claims.decide(found, {"a": DRAINING, "b": ALIVE})
    assert (decision.seats, decision.make, decision.remove) == ({"b": [3]}, [], [])
    assert claims.decide(gone(1, 2, 3), UP).seats == {}


# ---- whatever happens

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
    """A job's claims on a cluster to which things happen; what has to hold is asserted at every look."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ray = FakeRay(n0=2, n1=1)
        self.claims = Claims(most)
        self.seats: dict[str, list[int]] = {}
        self.drained: set[str] = set()

    def happen(self, event: str, index: int) -> None:
        ray = self.ray
        match event:
            case "add":
                ray.add(f"n{len(ray.table)}", index)
            case "drain" | "kill" if len(ray.table) > index:
                getattr(ray, event)(f"n{index}")
            case "take" if ray.live:  # somebody else removes one
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
                self.claims, self.seats = Claims(self.most), {}
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
        # None is leaked: what is there and does not go is what is wanted.
        assert len(present - set(decision.remove)) + len(decision.make) == self.most
        if acts:
            for number in decision.make:
                self.ray.make(str(number), {"CPU": 1}, detached=False)
            for id, group in self.ray.groups.items():
                if int(group.name) in decision.remove:
                    self.ray.remove(id)

    def settle(self) -> None:
        """Nothing happens any more."""
        for _ in range(4):
            self.look()
            self.ray.tick()
        self.look()


@given(st.integers(1, 5), EVENTS)
@settings(max_examples=3 * settings().max_examples)
def test_whatever_happens_no_slot_is_too_many_and_no_claim_is_lost(most, events):
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


def test_bundles_that_are_in_use_are_left_out():
    assert suitable({0: ONE, 1: ONE, 2: ONE}, ONE, {1: ONE}) == [0, 2]
    assert suitable({0: ONE, 1: ONE}, ONE, {0: {"CPU": 0.5}}) == [1]
    assert suitable({0: {"CPU": 2.0}, 1: ONE}, ONE, {0: ONE}) == [0, 1]
    assert suitable({0: ONE, 1: ONE}, ONE, {}) == [0, 1]


def test_what_a_caller_holds_is_told_by_the_names_of_its_resources():
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
def test_a_group_without_a_suitable_bundle_is_refused_with_what_it_has(in_use):
    recorded(
        "messages",
        refusal_of(
            suitable, {0: {"CPU": 1.0, "memory": 2e9}, 1: ONE}, {"GPU": 1, "CPU": 1}, in_use
        ),
    )


def test_what_asks_for_the_same():
    assert same({"CPU": 1, "GPU": 0}, {"CPU": 1.0})
    assert same({"CPU": 0.1}, {"CPU": 0.1 + 1e-9})
    assert not same({"CPU": 1}, {"CPU": 2})
    assert not same({"CPU": 1}, {"CPU": 1, "GPU": 0.5})


def test_a_shortage_says_what_was_asked_what_there_is_and_what_to_do():
    told: dict[str, Any] = {
        "at_least": 4,
        "placed": 1,
        "within_s": 100.0,
        "resources": {"CPU": 1, "GPU": 1},
        "free": {"CPU": 3.0, "CPU_group_0": 9.0, "GPU": 0.0},
        "nodes": 2,
        "too_large": False,
        "given": False,
    }
    said = shortage(**told)
    recorded("log", said)
    recorded("messages", shortage(**told | {"too_large": True}))
    recorded("messages", shortage(**told | {"free": {}, "nodes": 1}))
    recorded("messages", shortage(**told | {"given": True}))
