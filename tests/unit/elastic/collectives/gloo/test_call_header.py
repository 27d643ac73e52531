"""Data of the first exchange of a collective over Gloo, and its checks."""

from __future__ import annotations

import pytest
import torch

from elastic.collectives.gloo import call_header
from elastic.collectives.gloo.call_header import (
    DIRECT_BYTES,
    DIRECT_RANKS,
    CollectiveKind,
    FirstExchange,
    Header,
    Places,
)

SUM = call_header.header(CollectiveKind.ALLREDUCE, 8, dtype=1, op=1)


def exchanged(calls: list[tuple[Header, torch.Tensor | None]]) -> list[Places]:
    """Return the data that each rank receives."""
    size = len(calls)
    begun = [FirstExchange(rank, size).begin(*call) for rank, call in enumerate(calls)]
    for rank, (places, _, rows, _) in enumerate(begun):
        into = torch.split(places.flat, [row for row in rows if row])
        others = [peer for peer in range(size) if peer != rank]
        for peer, row in zip(others, into, strict=True):
            _, sent, _, lengths = begun[peer]
            message = torch.split(sent, lengths)[rank]
            row[: len(message)] = message
    return [places for places, *_ in begun]


def test_first_exchange_fits_up_to_a_limit_of_bytes_and_ranks():
    assert FirstExchange(0, 2).fits(DIRECT_BYTES // 2)
    assert not FirstExchange(0, 4).fits(DIRECT_BYTES // 4 + 1)
    assert not FirstExchange(0, DIRECT_RANKS + 1).fits(1)
    assert FirstExchange(0, DIRECT_RANKS + 1).fits(0)


@pytest.mark.parametrize("size", [2, 3, DIRECT_RANKS + 1])
def test_equal_calls_agree(size):
    header = call_header.header(CollectiveKind.BARRIER)
    assert all(places.agree(header) for places in exchanged([(header, None)] * size))


@pytest.mark.parametrize(
    "other",
    [
        call_header.header(CollectiveKind.BROADCAST, 8),
        call_header.header(CollectiveKind.ALLREDUCE, 4, dtype=1, op=1),
        call_header.header(CollectiveKind.ALLREDUCE, 1 << 40, dtype=1, op=1),
        call_header.header(CollectiveKind.ALLREDUCE, 8, dtype=2, op=1),
        call_header.header(CollectiveKind.ALLREDUCE, 8, dtype=1, op=3),
        call_header.header(CollectiveKind.BARRIER),
    ],
)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_every_rank_finds_a_different_call(other, who):
    own = torch.zeros(8, dtype=torch.uint8)
    calls: list[tuple[Header, torch.Tensor | None]] = [(SUM, own), (SUM, own), (SUM, own)]
    calls[who] = other, None
    for places, (header, _) in zip(exchanged(calls), calls, strict=True):
        assert not places.agree(header)


def test_payloads_are_ordered_by_rank():
    given = [torch.tensor([rank + 0.5, -rank], dtype=torch.float32) for rank in range(3)]
    found = exchanged([(SUM, each.view(torch.uint8)) for each in given])
    for rank, places in enumerate(found):
        parts = places.payloads(given[rank])
        assert [part.tolist() for part in parts] == [each.tolist() for each in given]


def test_buffers_of_the_first_exchange_are_reused():
    exchange = FirstExchange(0, 2)
    places, *_ = exchange.begin(SUM, None)
    another, *_ = exchange.begin(SUM, None)
    assert another is not places
    exchange.give_back(places)
    again, *_ = exchange.begin(SUM, None)
    assert again is places


@pytest.mark.parametrize("size", [2, DIRECT_RANKS + 1])
def test_splits_of_an_alltoall_are_exchanged_among_any_number_of_ranks(size):
    header = call_header.header(CollectiveKind.ALLTOALL, 4)
    given = [call_header.splits([rank] * size, [*range(size)]) for rank in range(size)]
    for rank, places in enumerate(exchanged([(header, each.view(torch.uint8)) for each in given])):
        assert places.agree(header)
        assert call_header.splits_agree(places.payloads(given[rank]))


def test_splits_agree_only_when_sent_and_received_rows_match():
    right = call_header.splits([1, 2], [1, 3]), call_header.splits([3, 4], [2, 4])
    assert call_header.splits_agree([*right])
    assert not call_header.splits_agree([right[0], call_header.splits([3, 4], [1, 4])])
    assert not call_header.splits_agree([call_header.splits([1, 2], [1, 4]), right[1]])
