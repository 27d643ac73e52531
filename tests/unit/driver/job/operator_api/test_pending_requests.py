"""Accepted requests of operators, until the world is as requested."""

from __future__ import annotations

import pytest

from elastic.driver.events import DrainRequested, RemoveRequested, ScaleRequested
from elastic.driver.job.operator_api.pending_requests import PendingRequests, request_text
from harness.conversation import worker
from harness.golden import recorded

A, B, C = worker("a:0"), worker("b:0"), worker("b:1")


@pytest.mark.parametrize(
    ("request_", "before", "after"),
    [
        (ScaleRequested(1, 3), [A, B], [A, B, C]),
        (ScaleRequested(1, 1), [A, B], [A]),
        (DrainRequested(1, "b"), [A, B, C], [A]),
        (RemoveRequested(1, B), [A, B], [A]),
    ],
)
def test_request_when_the_world_complies_then_is_done_once(request_, before, after):
    pending = PendingRequests()
    pending.accept(request_, before, 10.0)
    assert not pending.met(before, 11.0)
    [line] = pending.met(after, 22.5)
    recorded("log", line, "12.5", request_text(request_))
    assert not pending.met(after, 23.0)


@pytest.mark.parametrize(
    "request_", [ScaleRequested(1, 2), DrainRequested(1, "c"), DrainRequested(1, "a", True)]
)
def test_request_when_the_world_already_complies_then_no_line_follows(request_):
    pending = PendingRequests()
    pending.accept(request_, [A, B], 10.0)
    assert not pending.met([A, B], 11.0)


def test_request_when_replaced_by_a_later_one_then_only_the_later_one_is_done():
    pending = PendingRequests()
    for request in (
        *(ScaleRequested(1, 3), ScaleRequested(2, 1)),
        *(DrainRequested(3, "b"), DrainRequested(4, "b", True)),
    ):
        pending.accept(request, [A, B], 10.0)
    assert not pending.met([A, B, C], 11.0) and len(pending.met([A], 12.0)) == 1
