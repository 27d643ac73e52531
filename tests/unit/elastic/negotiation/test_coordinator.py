"""Which collectives may run, in what order: ranks communicate with their coordinator, by the line and at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import pytest

from elastic.negotiation.coordinator import Coordinator
from elastic.negotiation.message_table import bits
from elastic.negotiation.messages import (
    AGREE,
    ALL,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    LEAVE,
    NOTIFY,
    WAIT,
    Members,
    Request,
    RequestList,
    Response,
    ResponseList,
    mismatch,
)
from elastic.negotiation.response_cache import ResponseCache
from elastic.protocol.calls import Called
from harness.golden import recorded


@dataclass
class Call:
    """A collective that a rank has submitted."""

    asked: Request
    key: Hashable = None

    @property
    def name(self) -> str:
        return self.asked.name

    @property
    def lasting(self) -> bool:
        return self.asked.lasting

    def make_key(self) -> Hashable:
        return self.asked

    def request(self) -> Request:
        return self.asked


def reduce(name: str, *shape: int, **more: object) -> Request:
    tensors = (("float32", shape or (2,)),)
    return Request(ALLREDUCE, f"allreduce.{name}", tensors, lasting=True, **more)  # type: ignore[arg-type]


def gather(name: str, rows: int) -> Request:
    return Request(ALLGATHER, f"allgather.{name}", (("float32", (rows, 2)),), lasting=True)


def scatter(name: str, *splits: int) -> Request:
    tensors = (("float32", (sum(splits), 2)),)
    return Request(ALLTOALL, f"alltoall.{name}", tensors, splits=splits, lasting=True)


class Ranks:
    """``size`` ranks and their coordinator; messages are delivered at once."""

    def __init__(self, size: int, capacity: int = 1024) -> None:
        self.size = size
        self.coordinator = Coordinator(size, capacity)
        self.offers: dict[tuple[int, Members], ResponseCache[Call]] = {}
        self.ran: list[list[Response]] = [[] for _ in range(size)]
        self.said: list[RequestList] = []
        self.decisions: list[ResponseList] = []

    def side(self, rank: int, members: Members) -> ResponseCache[Call]:
        return self.offers.setdefault((rank, members), ResponseCache(members))

    def submit(self, rank: int, *requests: Request, members: Members = ALL) -> None:
        side = self.side(rank, members)
        for request in requests:
            side.submit(Call(request))
        offer = side.offer()
        assert offer is not None
        self.said.append(offer)
        for decision in self.coordinator.offer(rank, offer):
            self.deliver(decision)

    def wait(self, rank: int, name: str, line: str = "", members: Members = ALL) -> None:
        """It submits nothing before the end of this wait."""
        said = RequestList(members, 0, requests=(Request(WAIT, name, payload=line),))
        for decision in self.coordinator.offer(rank, said):
            self.deliver(decision)

    def deliver(self, decision: ResponseList) -> None:
        self.decisions.append(decision)
        for rank in decision.members or range(self.size):
            found = self.side(rank, decision.members).take(decision)
            self.ran[rank] += [response for response, _ in found]

    def names(self, rank: int = 0) -> list[str]:
        return [response.request.name.partition(".")[2] for response in self.ran[rank]]


def test_collectives_submitted_by_all_ranks_run_in_one_order():
    ranks = Ranks(3)
    ranks.submit(0, reduce("a"), reduce("b"))
    ranks.submit(1, reduce("b"))
    ranks.submit(2, reduce("a"), reduce("b"))
    assert ranks.names() == ["b"]
    ranks.submit(1, reduce("a"))
    assert [ranks.names(rank) for rank in range(3)] == [["b", "a"]] * 3
    assert not any(response.error for response in ranks.ran[0])


def test_a_repeated_name_is_sent_as_a_bit():
    ranks = Ranks(2)
    for _ in range(4):
        for rank in range(2):
            ranks.submit(rank, reduce("a"), reduce("b"))
    assert ranks.names(1) == ["a", "b"] * 4
    first, *_, last = ranks.said
    assert (len(first.requests), first.known) == (2, b"")
    assert (last.requests, last.known) == ((), b"\x03")


def test_steady_state_message_has_a_fixed_size_for_any_number_of_names():
    ranks = Ranks(2)
    names = [reduce(f"n{number}") for number in range(1024)]
    for _ in range(3):
        for rank in range(2):
            ranks.submit(rank, *names)
    assert len(ranks.said[-1].known) == 128
    assert ranks.names() == [f"n{number}" for number in range(1024)] * 3


def test_changed_shape_is_negotiated_again_when_peers_have_sent_bits():
    ranks = Ranks(3)
    for _ in range(2):
        for rank in range(3):
            ranks.submit(rank, reduce("a", 4))
    ranks.submit(0, reduce("a", 4))  # a bit
    ranks.submit(1, reduce("a", 5))  # a request
    ranks.submit(2, reduce("a", 4))  # a bit again
    error = ranks.ran[2][-1].error
    recorded("messages", error)
    for rank in range(3):
        ranks.submit(rank, reduce("a", 4))  # the old number still stands for the same
    assert ranks.said[-1].known == b"\x01"
    assert ranks.ran[0][-1].error == ""
    for _ in range(2):
        for rank in range(3):
            ranks.submit(rank, reduce("a", 5))
    assert ranks.said[-1].known == b"\x02"
    assert ranks.ran[0][-1].request.tensors == (("float32", (5,)),)


def test_rows_and_splits_reach_all_ranks_and_are_cached():
    ranks = Ranks(2)
    for _ in range(3):
        ranks.submit(0, gather("g", 1), scatter("s", 3, 4))
        ranks.submit(1, gather("g", 5), scatter("s", 0, 2))
    assert [response.rows for response in ranks.ran[1][-2:]] == [((1,), (5,)), ((3, 4), (0, 2))]
    assert ranks.said[-1].requests == ()
    ranks.submit(0, gather("g", 1))
    ranks.submit(1, gather("g", 6))
    assert ranks.ran[0][-1].rows == ((1,), (6,))


def test_process_sets_have_separate_names():
    ranks = Ranks(3)
    ranks.submit(0, reduce("a"), members=(0, 2))
    ranks.submit(1, reduce("a"))
    ranks.submit(2, reduce("a"), members=(0, 2))
    assert [ranks.names(rank) for rank in range(3)] == [["a"], [], ["a"]]


def test_exhausted_cache_numbers_are_dropped_by_all_ranks_at_once():
    ranks = Ranks(2, capacity=2)
    for name in "abcabcabcabc":
        for rank in range(2):
            ranks.submit(rank, reduce(name))
    assert ranks.names() == ranks.names(1) == list("abc") * 4
    assert ranks.decisions[-1].epoch > 0


def test_cache_bit_of_the_previous_epoch_is_accepted():
    ranks = Ranks(2, capacity=1)
    for _ in range(2):
        for rank in range(2):
            ranks.submit(rank, reduce("a"))
    late = RequestList(ALL, 0, b"\x01")  # "a", by its number
    for _ in range(2):
        for rank in range(2):
            ranks.submit(rank, reduce("b"))
    assert ranks.decisions[-1].epoch == 1
    assert ranks.coordinator.offer(0, late) == []
    (decision,) = ranks.coordinator.offer(1, late)
    assert decision.responses[0].request == reduce("a")


def test_joined_rank_is_not_awaited():
    ranks = Ranks(3)
    for _ in range(2):
        for rank in range(3):
            ranks.submit(rank, reduce("a"), gather("g", 1))
    ranks.submit(0, reduce("a"), reduce("new"), gather("g", 1))
    ranks.submit(2, reduce("a"), reduce("new"), gather("g", 1))
    before = len(ranks.ran[0])
    ranks.submit(1, Request(JOIN, JOIN))
    assert len(ranks.ran[1]) == len(ranks.ran[0]) == before + 3
    found = {response.request.name: response.error for response in ranks.ran[1][before:]}
    assert found["allreduce.a"] == found["allreduce.new"] == ""
    recorded("messages", found["allgather.g"])
    ranks.submit(2, Request(JOIN, JOIN))
    ranks.submit(0, reduce("a"))
    assert ranks.names()[-1] == "a"
    ranks.submit(0, Request(JOIN, JOIN))
    assert ranks.decisions[-1].last_joined == 0
    for rank in range(3):
        ranks.submit(rank, reduce("a"), gather("g", 2))
    assert [response.error for response in ranks.ran[0][-2:]] == ["", ""]


def test_collectives_submitted_before_a_join_run_when_all_ranks_have_joined():
    ranks = Ranks(2)
    for _ in range(2):
        for rank in range(2):
            ranks.submit(rank, reduce("a"))
    before = len(ranks.ran[0])
    ranks.submit(0, reduce("a"), reduce("b"), Request(JOIN, JOIN))
    ranks.submit(1, Request(JOIN, JOIN))
    assert sorted(ranks.names()[before:]) == sorted(ranks.names(1)[before:]) == ["a", "b"]
    assert ranks.decisions[-1].last_joined == 1


def test_join_ends_when_a_rank_leaves_without_joining():
    ranks = Ranks(3)
    ranks.submit(0, Request(JOIN, JOIN))
    ranks.submit(2, Request(LEAVE, LEAVE))
    recorded("messages", ranks.ran[0][-1].error)
    ranks.submit(1, Request(JOIN, JOIN))
    assert ranks.ran[1][-1].refused


def test_mismatch_in_a_long_group_or_a_close_scale_is_described():
    def group(*lengths: int) -> Request:
        tensors = tuple(("float32", (length,)) for length in lengths)
        return Request(ALLREDUCE, "allreduce.g", tensors, lasting=True)

    found = mismatch({0: group(1, 1, 1, 1, 2, 3), 1: group(1, 1, 1, 1, 3, 2)})
    recorded("messages", found)
    close = mismatch({0: reduce("a", scales=(1e6, 1.0)), 1: reduce("a", scales=(1e6 + 1, 1.0))})
    assert close.endswith("prescale_factor: rank 0 has 1000000.0, rank 1 has 1000001.0")


def test_a_leaving_rank_is_named_to_its_waiters():
    ranks = Ranks(3)
    for _ in range(2):
        for rank in range(3):
            ranks.submit(rank, reduce("a"))
    ranks.submit(0, reduce("a"))
    ranks.submit(0, reduce("b"))
    ranks.submit(2, Request(LEAVE, LEAVE))
    recorded("messages", sorted(response.error for response in ranks.ran[0][-2:]))
    assert all(response.refused for response in ranks.ran[0][-2:])
    ranks.submit(1, reduce("a"))  # too late, and by a bit
    assert ranks.ran[1][-1].refused
    ranks.submit(0, reduce("c"), members=(0, 1))
    ranks.submit(1, reduce("c"), members=(0, 1))
    assert ranks.ran[1][-1].error == ""


def test_joining_rank_is_acknowledged_before_collectives_complete_without_its_data():
    coordinator = Coordinator(3, 8)
    join = Request(JOIN, JOIN)
    [first] = coordinator.offer(2, RequestList(ALL, 0, b"", (join,)))
    assert (first.joined, first.last_joined) == (2, -1)
    [second] = coordinator.offer(0, RequestList(ALL, 0, b"", (join,)))
    assert second.joined == 0
    assert coordinator.offer(1, RequestList(ALL, 0, b"", (join,)))[-1].last_joined == 1


def test_all_payloads_of_an_agreement_reach_all_ranks():
    ranks = Ranks(2)
    ranks.submit(1, Request(AGREE, "agree.x", payload="one"))
    ranks.submit(0, Request(AGREE, "agree.x", payload="zero"))
    assert ranks.ran[1][0].payloads == ("zero", "one")


def test_notification_of_one_rank_reaches_all_members_in_the_order_of_the_coordinator():
    ranks = Ranks(3)
    ranks.submit(2, Request(NOTIFY, "notify.a", payload="first"), members=(0, 2))
    ranks.submit(0, Request(NOTIFY, "notify.a", payload="second"), members=(0, 2))
    assert [[each.request.payload for each in ran] for ran in ranks.ran] == [
        ["first", "second"],
        [],
        ["first", "second"],
    ]
    assert ranks.coordinator.stalled(1e9, 1.0, 1.0) == ([], [])


def test_collective_that_waits_too_long_is_named_once_with_its_missing_ranks():
    ranks = Ranks(3)
    for _ in range(2):
        for rank in range(3):
            ranks.submit(rank, reduce("a"))
    ranks.submit(0, reduce("a"), reduce("b"))
    ranks.submit(1, reduce("b"))
    look = ranks.coordinator.stalled
    assert look(10.0, 60.0, 0.0) == ([], [])
    assert look(69.9, 60.0, 0.0) == ([], [])
    sentences, _ = look(70.0, 60.0, 0.0)
    recorded("messages", sentences)
    assert look(71.0, 60.0, 0.0) == ([], [])
    ranks.submit(2, reduce("b"))
    _, decisions = look(200.0, 60.0, 100.0)
    recorded("messages", [response.error for response in decisions[0].responses])


def test_progress_between_two_checks_restarts_the_wait():
    def always(ranks: Ranks, request: Request) -> None:
        """At every check, rank 0 has submitted it and waits; it ran many times in between."""
        ranks.submit(0, request)
        for now in range(200):
            assert ranks.coordinator.stalled(float(now), 60.0, 100.0) == ([], [])
            for _ in range(2):
                ranks.submit(1, request)
                ranks.submit(0, request)
        assert ranks.names().count("a") == 400
        assert ranks.coordinator.stalled(200.0, 60.0, 100.0) == ([], [])
        [sentence], _ = ranks.coordinator.stalled(260.0, 60.0, 100.0)  # now it really waits
        recorded("messages", sentence, request.name)

    always(Ranks(2, capacity=0), reduce("a"))  # by its name every time
    always(Ranks(2), gather("a", 1))  # by its number


def test_resubmitted_collective_gets_its_full_time_limit_after_a_shutdown():
    ranks = Ranks(2)
    look = ranks.coordinator.stalled
    ranks.submit(0, reduce("a"))
    look(0.0, 60.0, 100.0)
    _, [given_up] = look(100.0, 60.0, 100.0)
    ranks.deliver(given_up)
    ranks.submit(0, reduce("a"))
    assert look(101.0, 60.0, 100.0) == ([], [])
    [sentence], _ = look(161.0, 60.0, 100.0)
    recorded("messages", sentence)
    ranks.submit(1, reduce("a"))
    assert ranks.ran[1][-1].error == ""


def test_stalled_wait_continues_during_other_collectives_and_a_changed_request():
    ranks = Ranks(3)
    for _ in range(2):
        for rank in range(3):
            ranks.submit(rank, reduce("a"), reduce("b"))
    look = ranks.coordinator.stalled
    ranks.submit(0, reduce("a"), reduce("b"))
    look(0.0, 60.0, 0.0)
    for rank in (1, 2):
        ranks.submit(rank, reduce("b"))
    look(30.0, 60.0, 0.0)
    ranks.submit(1, reduce("a", 7))
    [sentence], _ = look(60.0, 60.0, 0.0)
    recorded("messages", sentence)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (reduce("a"), reduce("a", 3), "the shape: rank 0 has [2], rank 1 has [3]"),
        (reduce("a", op=1), reduce("a", op=3), "the reduction: rank 0 has Sum, rank 1 has Min"),
        (reduce("a"), reduce("a", scales=(0.5, 1.0)), "prescale_factor"),
        (reduce("a"), reduce("a", scales=(1.0, 2.0)), "postscale_factor"),
        (reduce("a"), reduce("a", device="cuda"), "the device: rank 0 has cpu, rank 1 has cuda"),
        (Request("broadcast", "b", root=0), Request("broadcast", "b", root=1), "the root rank"),
        (reduce("a"), Request(ALLREDUCE, "allreduce.a", (("int64", (2,)),)), "the dtype"),
        (gather("g", 1), gather("g", 9), ""),
        (scatter("s", 1, 2), scatter("s", 3, 4), ""),
        (Request(BARRIER, "barrier"), Request(BARRIER, "barrier"), ""),
    ],
)
def test_mismatch_names_the_difference_and_its_ranks(first, second, words):
    found = mismatch({0: first, 1: second})
    assert (words in found) if words else not found


def test_bits_are_sent_in_ascending_order():
    assert list(bits((1 << 1000) | (1 << 9) | 1)) == [0, 9, 1000]


def test_ranks_in_a_deadlock_immediately_get_the_calls_of_all_ranks():
    ranks = Ranks(3)
    for _ in range(3):  # the names have numbers
        for rank in range(3):
            ranks.submit(rank, reduce("loss"))
    ranks.submit(0, reduce("x", 3))
    ranks.submit(1, Request(BROADCAST, "broadcast.x", (("int64", (2, 4)),)))
    ranks.submit(2, reduce("loss"))  # a bit
    before = len(ranks.decisions)
    ranks.wait(0, "allreduce.x", "a.py:3")
    ranks.wait(1, "broadcast.x", "a.py:5")
    assert len(ranks.decisions) == before, "rank 2 may come yet"
    ranks.wait(2, "allreduce.loss", "a.py:1")
    calls = (
        Called(0, "allreduce.x", "a.py:3", "float32 [3]"),
        Called(1, "broadcast.x", "a.py:5", "int64 [2, 4]"),
        Called(2, "allreduce.loss", "a.py:1", "float32 [2]"),
    )
    ended = [each for each in ranks.ran[0] if each.error]
    assert [each.request.name for each in ended] == [each.name for each in calls]
    assert all(each.calls == calls and not each.refused for each in ended)
    assert ranks.ran[0][-3:] == ranks.ran[1][-3:] == ranks.ran[2][-3:]
    for rank in range(3):  # nothing of it is left
        ranks.submit(rank, reduce("loss"))
    assert not ranks.ran[0][-1].error and ranks.ran[0][-1].request.name == "allreduce.loss"


def test_wait_for_ranks_that_can_arrive_is_not_a_deadlock():
    ranks = Ranks(3)
    ranks.submit(0, reduce("a"))
    ranks.submit(1, reduce("a"))
    ranks.wait(0, "allreduce.a")
    ranks.wait(1, "allreduce.a")
    ranks.submit(2, reduce("b"))
    ranks.submit(2, reduce("a"))  # asynchronous: it waits for b, whose turn comes
    ranks.wait(2, "allreduce.b")
    ranks.submit(0, reduce("b"))
    ranks.submit(1, reduce("b"))
    ranks.wait(0, "allreduce.a")  # over before the message arrived
    ranks.wait(1, "allreduce.b")
    assert not any(each.error for rank in ranks.ran for each in rank)
    assert ranks.names(2) == ["a", "b"]


def test_deadlock_across_process_sets_is_found_without_joined_ranks():
    ranks = Ranks(3)
    ranks.submit(2, Request(JOIN, JOIN))
    ranks.submit(0, reduce("a"))
    ranks.submit(1, reduce("b"), members=(0, 1))
    ranks.wait(1, "allreduce.b", members=(0, 1))
    ranks.wait(0, "allreduce.a")
    calls = (
        Called(0, "allreduce.a", "", "float32 [2]"),
        Called(1, "allreduce.b", "", "float32 [2]"),
    )
    assert [each.calls for each in ranks.ran[0]] == [calls, calls]
    assert [each.calls for each in ranks.ran[2]] == [calls]


def test_join_of_the_last_rank_reveals_a_deadlock():
    ranks = Ranks(3)
    for rank, name in enumerate("ab"):
        ranks.submit(rank, reduce(name))
        ranks.wait(rank, f"allreduce.{name}")
    assert not ranks.ran[0]
    ranks.submit(2, Request(JOIN, JOIN))
    assert [len(each.calls) for each in ranks.ran[0]] == [2, 2]


def test_a_mismatch_lists_the_calls_of_each_group_of_ranks():
    ranks = Ranks(3)
    for rank, rows in enumerate((3, 4, 3)):
        ranks.submit(rank, reduce("x", rows))
    [found] = ranks.ran[2]
    assert found.calls == (
        Called(0, "allreduce.x", "", "float32 [3]"),
        Called(1, "allreduce.x", "", "float32 [4]"),
    )


@pytest.mark.parametrize("seed", range(30))
def test_equal_calls_in_any_order_cause_no_deadlock(seed):
    """Each rank submits all calls of a round in its own order, then waits for each, announced at random."""
    chance = random.Random(seed)
    size = chance.randrange(2, 5)
    coordinator = Coordinator(size, capacity=chance.choice([0, 2, 1024]))
    sides = [ResponseCache[Call](ALL) for _ in range(size)]
    up: list[deque[RequestList]] = [deque() for _ in range(size)]
    down: list[deque[ResponseList]] = [deque() for _ in range(size)]
    names = [f"n{number}" for number in range(4)]
    rounds, over = [0] * size, [0] * size
    for _ in range(20_000):
        rank = chance.randrange(size)
        side = sides[rank]
        match chance.randrange(4):
            case 0 if not side.in_flight and rounds[rank] < 5:
                rounds[rank] += 1
                for name in chance.sample(names, len(names)):
                    side.submit(Call(reduce(name)))
                    if chance.random() < 0.5 and (offer := side.offer()) is not None:
                        up[rank].append(offer)
            case 1 if side.in_flight:
                if (offer := side.offer()) is not None:
                    up[rank].append(offer)
                wait = Request(WAIT, chance.choice([*side.in_flight]))
                up[rank].append(RequestList(ALL, 0, requests=(wait,)))
            case 2 if up[rank]:
                for decision in coordinator.offer(rank, up[rank].popleft()):
                    for each in down:
                        each.append(decision)
            case 3 if down[rank]:
                for response, _ in side.take(down[rank].popleft()):
                    assert not response.error, response.error
                    over[rank] += 1
    assert over == [5 * len(names)] * size


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_run_in_one_order_on_all_ranks(seed):
    """Each rank submits the same calls in its own order; messages take any time, in order on each connection."""
    chance = random.Random(seed)
    size = chance.randrange(2, 6)
    coordinator = Coordinator(size, capacity=chance.choice([0, 1, 3, 1024]))
    sets: list[Members] = [ALL, (0, 1), (0, size - 1), tuple(range(1, size))]
    sets = [members for members in dict.fromkeys(sets) if len(members) != 1]
    names = [f"n{number}" for number in range(6)]
    programs: list[deque[tuple[Members, Request]]] = [deque() for _ in range(size)]
    expected: list[list[tuple[Members, str]]] = [[] for _ in range(size)]
    for _ in range(12):  # rounds: within one, a name comes once
        calls = [(chance.choice(sets), name) for name in names if chance.random() < 0.7]
        rows = chance.choice([1, 1, 2])
        for rank in range(size):
            own = [(members, name) for members, name in calls if rank in (members or range(size))]
            chance.shuffle(own)
            for members, name in own:
                kind = gather(name, rows + rank) if name in names[:2] else reduce(name, rows)
                programs[rank].append((members, kind))
            expected[rank] += sorted((members, name) for members, name in own)
    sides = [{members: ResponseCache[Call](members) for members in sets} for _ in range(size)]
    up: list[deque[RequestList]] = [deque() for _ in range(size)]
    down: list[deque[ResponseList]] = [deque() for _ in range(size)]
    ran: list[list[tuple[Members, str]]] = [[] for _ in range(size)]
    for _ in range(100_000):
        rank = chance.randrange(size)
        match chance.randrange(3):
            case 0 if programs[rank]:
                members, request = programs[rank][0]
                if request.name not in sides[rank][members].in_flight:
                    programs[rank].popleft()
                    sides[rank][members].submit(Call(request))
                if chance.random() < 0.5:
                    offers = [side.offer() for side in sides[rank].values()]
                    up[rank].extend(offer for offer in offers if offer is not None)
            case 0:
                offers = [side.offer() for side in sides[rank].values()]
                up[rank].extend(offer for offer in offers if offer is not None)
            case 1 if up[rank]:
                for decision in coordinator.offer(rank, up[rank].popleft()):
                    for member in decision.members or range(size):
                        down[member].append(decision)
            case 2 if down[rank]:
                decision = down[rank].popleft()
                for response, call in sides[rank][decision.members].take(decision):
                    assert call is not None, "only joined ranks have submitted nothing"
                    assert not response.error, response.error
                    if response.request.kind == ALLGATHER:
                        position = (decision.members or tuple(range(size))).index(rank)
                        assert response.rows[position] == (call.asked.tensors[0][1][0],)
                    ran[rank].append((decision.members, response.request.name.split(".")[1]))
        if all(len(done) == len(all_of) for done, all_of in zip(ran, expected, strict=True)):
            break
    for rank in range(size):
        assert sorted(ran[rank]) == sorted(expected[rank])
        for other in range(size):
            common = set(sets) & {
                m for m in sets if rank in (m or range(size)) and other in (m or range(size))
            }
            assert [each for each in ran[rank] if each[0] in common] == [
                each for each in ran[other] if each[0] in common
            ], "one order for all"
