"""Settings that contradict each other are refused, each with a sentence that says what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.driver.settings import UNBOUNDED, Settings
from harness.refusals import refusal_of

GOOD: dict[str, Any] = {"np": 4, "workers_min": 2, "workers_max": 8, "elastic": True}


def test_good_settings_are_taken_and_frozen():
    settings = Settings(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.np = 5  # type: ignore[misc]
    assert Settings(**GOOD | {"workers_max": UNBOUNDED}).workers_max == UNBOUNDED


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"np": 0}, "-np is 0; give at least 1 worker"),
        ({"np": -3}, "-np is -3; give at least 1 worker"),
        ({"workers_min": 0}, "give 1 <= min <= max"),
        ({"workers_min": 9}, "--min-np 9 and --max-np 8 leave no possible size"),
        ({"np": 1}, "-np 1 is outside --min-np 2 .. --max-np 8"),
        ({"np": 9}, "-np 9 is outside --min-np 2 .. --max-np 8"),
        ({"start_timeout_s": 0.0}, "give a positive number of seconds"),
        ({"elastic_timeout_s": -1.0}, "give a positive number of seconds"),
        ({"cooldown_min_s": 0.0}, "give a positive number of seconds"),
        ({"cooldown_min_s": 300.0}, "give MIN <= MAX"),
        ({"reset_limit": -1}, "--reset-limit is -1; give 0 or more"),
        ({"slot_attempts": 0}, "--slot-attempts is 0; give 1 or more"),
        ({"host_attempts": 0}, "--host-attempts is 0; give 1 or more"),
        ({"lease_s": 0.0}, "--lease is 0; give a positive number of seconds"),
        ({"idle_s": -1.0}, "--idle-timeout is -1; give seconds, or 0 to turn it off"),
        ({"busy_warning_s": -1.0}, "--busy-warning is -1; give seconds, or 0 to turn it off"),
        ({"busy_s": -1.0}, "--busy-timeout is -1; give seconds, or 0 to turn it off"),
        ({"dump_s": -1.0}, "dump_s is -1; give 0 or more seconds"),
        ({"kill_s": 0.0}, "kill_s is 0; give a positive number of seconds"),
    ],
)
def test_contradictions_are_told(changed, said):
    assert said in refusal_of(Settings, **GOOD | changed)
