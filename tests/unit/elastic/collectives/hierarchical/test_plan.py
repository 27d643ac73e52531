"""Data paths between hosts: ranks, chunks, the order of turns, and the paths of broadcasts and parcels."""

from __future__ import annotations

import pytest

from elastic.collectives.hierarchical import plan
from elastic.collectives.hierarchical.plan import Exchange, Parcel, Topology, Turn

EVEN = ((0, 1), (2, 3), (4, 5))
MIXED = ((0, 3), (2, 1))  # as ranks that were assigned to hosts round-robin
UNEVEN = ((0,), (1, 2), (3, 4, 5))
ALL = pytest.mark.parametrize("hosts", [EVEN, MIXED, UNEVEN, ((0, 1, 2), (3,))], ids=str)


def topologies(hosts: tuple[tuple[int, ...], ...]) -> list[Topology]:
    return [Topology(hosts, rank) for rank in range(sum(map(len, hosts)))]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_every_rank_of_equal_hosts_exchanges_within_its_lane():
    assert [each.inter_node_ranks for each in topologies(EVEN)] == [(0, 2, 4), (1, 3, 5)] * 3
    assert [each.inter_node_group for each in topologies(EVEN)] == [0, 1] * 3
    assert [each.inter_node_ranks for each in topologies(MIXED)] == [(0, 2), (3, 1), (0, 2), (3, 1)]


def test_only_leaders_of_unequal_hosts_exchange_between_hosts():
    assert [each.inter_node_ranks for each in topologies(UNEVEN)] == [
        (0, 1, 3),
        (0, 1, 3),
        (),
        (0, 1, 3),
        (),
        (),
    ]
    assert Topology(UNEVEN, 5).local_ranks == (3, 4, 5)
    assert Topology(UNEVEN, 0).behind(3) == (3, 4, 5)


@pytest.mark.parametrize(
    ("hosts", "rank"), [(((0, 1), ()), 0), (((0, 1), (1,)), 0), (((0, 2),), 0), (((0, 1),), 2)]
)
def test_hosts_that_do_not_partition_the_ranks_are_refused(hosts, rank):
    with pytest.raises(ValueError, match="rank"):
        Topology(hosts, rank)


# ---- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 4096, 4097, 1_000_003])
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_chunks_cover_all_elements_once_and_fit_the_limit(count, element_bytes):
    spans = plan.chunks(count, element_bytes, 4096)
    assert [begin for begin, _ in spans] == [0] + [end for _, end in spans[:-1]]
    assert spans[-1][1] == count
    assert all(0 < (end - begin) * element_bytes <= 4096 for begin, end in spans)
    assert all(begin % 64 == 0 for begin, _ in spans)


def test_chunks_have_about_equal_sizes_and_none_is_empty():
    assert plan.chunks(1100, 4, 4096) == [(0, 576), (576, 1100)]
    assert plan.chunks(0, 4, 4096) == []


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_next_chunks_are_reduced_while_one_is_exchanged():
    reduce, cross, spread = Turn.REDUCE, Turn.CROSS, Turn.SPREAD
    assert list(plan.schedule(4)) == [
        (reduce, 0),
        *[(reduce, 1), (cross, 0)],
        *[(reduce, 2), (cross, 1), (spread, 0)],
        *[(reduce, 3), (cross, 2), (spread, 1)],
        *[(cross, 3), (spread, 2)],
        (spread, 3),
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_every_chunk_has_its_three_turns_in_order(number, ahead):
    turns = list(plan.schedule(number, ahead))
    assert len(turns) == 3 * number
    for chunk in range(number):
        assert [turn for turn, of in turns if of == chunk] == list(Turn)


# ---- broadcast -------------------------------------------------------------------------------------------------------


@ALL
def test_broadcast_reaches_every_rank_from_ranks_that_have_the_data(hosts):
    everybody = topologies(hosts)
    for root in range(len(everybody)):
        routes = {each.rank: plan.route(each, root) for each in everybody}
        have = {root}
        for step in ("first", "cross", "last"):
            arrived = set()
            for each in everybody:
                source = getattr(routes[each.rank], step)
                if source is not None:
                    group = each.inter_node_ranks if step == "cross" else each.local_ranks
                    # All of a group take part, and all name the same source.
                    assert {getattr(routes[peer], step) for peer in group} == {source}
                    assert group[source] in have
                    arrived.add(each.rank)
            have |= arrived
        assert have == set(range(len(everybody)))


def test_broadcast_crosses_between_hosts_only_in_the_lane_of_the_root():
    routes = [plan.route(each, 3) for each in topologies(EVEN)]
    assert [route.cross for route in routes] == [None, 1] * 3
    assert all(route.first is None and route.last == 1 for route in routes)


# ---- alltoall --------------------------------------------------------------------------------------------------------


def carried_out(
    held: dict[int, list[Parcel]], step: str, everybody: list[Topology]
) -> dict[int, list[Parcel]]:
    """Track the holders of parcels after each step; sent ones must be held, and expected at the receiver."""
    exchanges: dict[int, Exchange | None] = {
        each.rank: getattr(plan.posting(each), step) for each in everybody
    }
    after = dict(held)
    for each in everybody:
        exchange = exchanges[each.rank]
        if exchange is None:
            continue
        group = each.inter_node_ranks if step == "cross" else each.local_ranks
        arrived = []
        for index, peer in enumerate(group):
            theirs = exchanges[peer]
            assert theirs is not None
            sent = theirs.sent[group.index(each.rank)]
            assert sent == exchange.received[index]
            assert set(sent) <= set(held[peer])
            arrived += sent
        after[each.rank] = arrived
    return after


@ALL
def test_every_parcel_arrives_and_crosses_between_hosts_only_when_needed(hosts):
    everybody = topologies(hosts)
    size = len(everybody)
    held = {rank: [(rank, to) for to in range(size)] for rank in range(size)}
    held = carried_out(held, "collect", everybody)
    held = carried_out(held, "cross", everybody)
    for each in everybody:
        assert not each.inter_node_ranks or all(to in each.local_ranks for _, to in held[each.rank])
    held = carried_out(held, "deal", everybody)
    for rank in range(size):
        assert sorted(held[rank]) == [(sender, rank) for sender in range(size)]
