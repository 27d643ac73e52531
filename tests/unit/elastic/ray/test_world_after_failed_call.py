"""A world is formed for one message to regroup, whichever rank receives that message first."""

from __future__ import annotations

from elastic.ray.world_after_failed_call import Regroupings


def meet(*ranks: Regroupings) -> None:
    for rank in ranks:
        rank.meet()
    for rank in ranks:
        rank.met(max(rank.number for rank in ranks))


def test_rank_waiting_in_init_gets_the_regroup_message_after_the_rendezvous():
    regrouping, waiting = Regroupings(), Regroupings()
    assert regrouping.receive()
    assert regrouping.begin()
    meet(regrouping, waiting)
    assert not regrouping.ahead
    assert waiting.ahead  # its call has no future

    assert not waiting.receive()  # the new world stays
    assert not waiting.begin()  # and is the one that the word asks for
    assert not waiting.ahead


def test_regroup_message_may_arrive_during_the_rendezvous():
    regrouping, waiting = Regroupings(), Regroupings()
    regrouping.receive()
    regrouping.begin()
    waiting.meet()
    assert not waiting.receive()
    waiting.met(regrouping.number)
    assert waiting.ahead
    assert not waiting.over


def test_failed_function_after_the_rendezvous_allows_the_next_regrouping():
    first, second = Regroupings(), Regroupings()
    meet(first, second)
    assert not first.ahead
    assert not first.over
    assert first.receive()
    assert first.begin()


def test_regrouping_is_over_when_its_call_is_cancelled_during_the_rendezvous():
    first, second = Regroupings(), Regroupings()
    for rank in (first, second):
        rank.meet()
        assert not rank.receive()
        rank.met(0)
        assert not rank.ahead
        assert rank.over  # this world is not the one that the word asks for
        assert rank.begin()
