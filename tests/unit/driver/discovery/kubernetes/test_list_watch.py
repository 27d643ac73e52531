"""Watch of one kind of objects while the API server answers, expires versions, rejects and is away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec, patch

import pytest

from elastic.driver.discovery.kubernetes.api_client import (
    ApiClient,
    ApiError,
    ApiErrorKind,
    Resource,
)
from elastic.driver.discovery.kubernetes.list_watch import Changed, Listed, ListWatch, WatchFailed
from harness.kubernetes_objects import pod

AWAY = ApiError(ApiErrorKind.UNREACHABLE, "connection refused")
FORBIDDEN = ApiError(ApiErrorKind.FORBIDDEN)
GONE = ApiError(ApiErrorKind.GONE)
TOO_OLD = {"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}


def modified(name: str, version: int, kind: str = "MODIFIED") -> dict[str, Any]:
    return {"type": kind, "object": pod(name, version=version)}


def bookmark(version: int) -> dict[str, Any]:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


class OutOfAnswers(BaseException):
    """The conversation has ended."""


def conversation(*answers: Any) -> tuple[list[str], list[Any], list[float]]:
    """Return the requests, the updates, and the longest pauses between.

    A list of events answers a watch, a number is the version of a list.
    """
    left = [*answers]
    requests: list[str] = []
    updates: list[Any] = []
    pauses: list[float] = []

    def answer(question: str) -> Any:
        if not left:
            raise OutOfAnswers
        requests.append(question)
        now = left.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    cluster = create_autospec(ApiClient, instance=True)
    cluster.all.side_effect = lambda kind: ([pod("w-0")], str(answer(f"{kind.value}?")))
    cluster.events.side_effect = lambda kind, version: iter(answer(f"from {version}?"))
    with contextlib.suppress(OutOfAnswers), patch("random.uniform", lambda least, most: most):
        ListWatch(
            cluster, Resource.PODS, updates.append, clock=lambda: 0.0, pause=pauses.append
        ).run()
    return requests, updates, pauses


LISTED = Listed(Resource.PODS, [pod("w-0")])


def test_list_is_followed_by_changes_from_its_version():
    requests, updates, _ = conversation(
        7, [modified("w-1", 8, "ADDED"), modified("w-1", 9, "DELETED")]
    )
    assert requests == ["pods?", "from 7?"]
    came, went = pod("w-1", version=8), pod("w-1", version=9)
    assert updates == [
        LISTED,
        Changed(Resource.PODS, came, deleted=False),
        Changed(Resource.PODS, went, deleted=True),
    ]


def test_ended_watch_continues_from_its_version_after_a_pause():
    requests, _, pauses = conversation(7, [modified("w-1", 8)], [bookmark(12)], [])
    assert requests == ["pods?", "from 7?", "from 8?", "from 12?"]
    assert pauses == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("forgotten", [GONE, [TOO_OLD]])
def test_expired_version_is_followed_by_a_new_list(forgotten):
    requests, updates, _ = conversation(7, forgotten, 90, [])
    assert requests == ["pods?", "from 7?", "pods?", "from 90?"]
    assert updates == [LISTED, LISTED]


def test_failure_and_its_end_are_reported_once():
    requests, updates, pauses = conversation(7, AWAY, AWAY, AWAY, [], [])
    assert requests == ["pods?"] + 5 * ["from 7?"]
    assert updates == [LISTED, WatchFailed(Resource.PODS, AWAY), WatchFailed(Resource.PODS, None)]
    assert pauses[:3] == [0.2, 0.4, 0.8]


def test_account_that_may_not_watch_lists_repeatedly():
    requests, updates, pauses = conversation(7, FORBIDDEN, 8, FORBIDDEN, 9, FORBIDDEN)
    assert requests == ["pods?", "from 7?", "pods?", "from 8?", "pods?", "from 9?"]
    assert updates == [LISTED, WatchFailed(Resource.PODS, FORBIDDEN), LISTED, LISTED]
    assert pauses == [2.0, 4.0, 8.0]


def test_different_failure_is_reported():
    _, updates, _ = conversation(AWAY, FORBIDDEN, AWAY)
    assert [each.error.why for each in updates] == [AWAY.why, FORBIDDEN.why, AWAY.why]


def test_pauses_grow_to_a_limit_and_are_longer_without_permission():
    _, _, pauses = conversation(*(9 * [AWAY]))
    assert pauses[-1] == 10.0
    _, _, pauses = conversation(*(9 * [FORBIDDEN]))
    assert (pauses[0], pauses[-1]) == (2.0, 30.0)


def test_invalid_events_and_client_errors_are_failures():
    events: Any
    for events in (
        [{}],
        [{"type": "ADDED", "object": None}],
        [{"type": "ERROR", "object": {"code": 500}}],
    ):
        _, updates, _ = conversation(7, events)
        assert updates[1].error.why is ApiErrorKind.OTHER
    _, updates, _ = conversation(KeyError("token"))
    assert "KeyError" in str(updates[0].error)


def test_no_change_is_reported_after_close():
    updates: list[Any] = []
    cluster = create_autospec(ApiClient, instance=True)
    watching = ListWatch(cluster, Resource.NODES, updates.append)

    def events(kind: Resource, version: str) -> Iterator[Any]:
        yield modified("w-1", 8)
        watching.close()
        yield modified("w-2", 9)

    cluster.all.return_value = ([], "7")
    cluster.events.side_effect = events
    watching.run()
    assert [type(each) for each in updates] == [Listed, Changed]
