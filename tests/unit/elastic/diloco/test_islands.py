"""Islands of a world: members, leaders, and the source of the inner parameters."""

from elastic.diloco.islands import Islands


def seen_by_all(*names: str) -> list[Islands]:
    return [Islands(names, rank) for rank in range(len(names))]


def test_leader_of_an_island_is_its_lowest_rank_on_every_rank():
    ranks = seen_by_all("b", "a", "a", "b", "a")
    assert [each.members for each in ranks] == [(0, 3), (1, 2, 4), (1, 2, 4), (0, 3), (1, 2, 4)]
    assert [each.leader for each in ranks] == [0, 1, 1, 0, 1]
    assert [each.leads for each in ranks] == [True, True, False, False, False]
    assert {each.leaders for each in ranks} == {(0, 1)}


def test_another_member_leads_after_the_loss_of_the_leader():
    before, after = seen_by_all("a", "b", "a", "b"), seen_by_all("b", "a", "b")
    assert before[0].leader == 0
    assert [each.leader for each in after] == [0, 1, 0]


def test_leaders_are_updated_when_an_island_is_lost_or_added():
    assert seen_by_all("a", "a")[0].leaders == (0,)
    assert seen_by_all("a", "c", "a")[0].leaders == (0, 1)


def test_workers_apart_each_lead_their_own_island():
    ranks = [Islands.apart(3, rank) for rank in range(3)]
    assert [each.leader for each in ranks] == [0, 1, 2]
    assert {each.leaders for each in ranks} == {(0, 1, 2)}


def test_source_of_the_inner_parameters_is_the_lowest_rank_with_the_most_changes_of_the_island():
    ranks = seen_by_all("a", "b", "a", "b", "a")
    changes = [16, 20, 17, 20, 17]
    assert [each.source(changes) for each in ranks] == [2, None, 2, None, 2]


def test_new_island_has_no_source():
    assert Islands(("a", "b", "b"), 1).source([9, 0, 0]) is None
