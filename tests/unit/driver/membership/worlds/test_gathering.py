"""Reminders about awaited workers: when the first is due, in each kind of gathering."""

from __future__ import annotations

import msgspec
import pytest

from elastic.driver.membership.worlds.gathering import REMIND_S, START_REMIND_S, Gathering, Kind
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings


def gathering(kind: Kind) -> Gathering:
    return Gathering(
        kind,
        because(ReasonKind.FIRST_START),
        0.0,
        Settings(np=2, workers_min=1, workers_max=4, elastic=True),
    )


@pytest.mark.parametrize(
    ("kind", "after_s"),
    [(Kind.START, START_REMIND_S), (Kind.CHANGE, REMIND_S), (Kind.RECOVERY, REMIND_S)],
)
def test_a_start_is_given_more_time_than_a_step(kind, after_s):
    gathers = gathering(kind)
    assert gathers.remind_at == after_s
    gathers.remind_after_s *= 2
    gathers.begin_again(100.0)
    assert gathers.remind_at == 100.0 + after_s
    assert START_REMIND_S > REMIND_S


def test_a_snapshot_keeps_the_next_reminder():
    gathers = gathering(Kind.START)
    gathers.remind_after_s = 4 * START_REMIND_S
    taken = msgspec.to_builtins(gathers.kind), gathers.remind_after_s
    again = Gathering(
        Kind(taken[0]), gathers.reason, 0.0, gathers.settings, remind_after_s=taken[1]
    )
    assert again.remind_at == gathers.remind_at
