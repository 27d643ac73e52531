"""The calls of ranks, as values and as a sentence."""

from __future__ import annotations

from elastic.protocol.calls import DISTINCT, Called, distinct, sentence

CALLS = [
    Called(0, "allreduce", "a.py:3"),
    Called(4, "broadcast", "", "float32 [3]"),
    Called(7, "allreduce", "a.py:3"),
]


def test_sentence_names_each_call_once_with_its_ranks():
    told = sentence(CALLS)
    assert told.count("allreduce at a.py:3") == told.count("broadcast of float32 [3]") == 1
    assert all(str(rank) in told for rank in (0, 4, 7))


def test_distinct_calls_are_the_first_ranks_and_no_more_than_a_message_has():
    assert distinct(CALLS) == (CALLS[0], CALLS[1])
    many = distinct(Called(rank, f"allreduce.{rank}") for rank in range(100))
    assert many == tuple(Called(rank, f"allreduce.{rank}") for rank in range(DISTINCT))
