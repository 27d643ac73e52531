"""A world is formed for one message to regroup, whichever rank receives that message first."""

from __future__ import annotations

from elastic.ray.regroupings import Regroupings


def meet(*ranks: Regroupings) -> None:
    for rank in ranks:
        rank.meet()
    for rank in ranks:
        rank.met(max(rank.number for rank in ranks))


def test_a_rank_that_waits_in_init_gets_the_message_after_the_rendezvous():
    regrouping, waiting = Regroupings(), Regroupings()
    assert regrouping.tell()
    assert regrouping.begin()
    meet(regrouping, waiting)
    assert not regrouping.ahead
    assert waiting.ahead  # its call has no future

    assert not waiting.tell()  # the new world stays
    assert not waiting.begin()  # and is the one that the word asks for
    assert not waiting.ahead


def test_the_message_arrives_during_the_rendezvous():
    regrouping, waiting = Regroupings(), Regroupings()
    regrouping.tell()
    regrouping.begin()
    waiting.meet()
    assert not waiting.tell()
    waiting.met(regrouping.number)
    assert waiting.ahead
    assert not waiting.over


def test_after_a_rendezvous_one_of_the_functions_fails():
    first, second = Regroupings(), Regroupings()
    meet(first, second)
    assert not first.ahead
    assert not first.over
    assert first.tell()
    assert first.begin()


def test_functions_rendezvous_in_a_call_that_is_cancelled_meanwhile():
    first, second = Regroupings(), Regroupings()
    for rank in (first, second):
        rank.meet()
        assert not rank.tell()
        rank.met(0)
        assert not rank.ahead
        assert rank.over  # this world is not the one that the word asks for
        assert rank.begin()
