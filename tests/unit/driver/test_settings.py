"""Contradictory settings are rejected, each with a remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic.driver.settings import UNBOUNDED, Settings
from harness.golden import recorded
from harness.refusals import refusal_of

GOOD: dict[str, Any] = {"np": 4, "workers_min": 2, "workers_max": 8, "elastic": True}


def test_valid_settings_are_accepted_and_frozen():
    settings = Settings(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.np = 5  # type: ignore[misc]
    assert Settings(**GOOD | {"workers_max": UNBOUNDED}).workers_max == UNBOUNDED


@pytest.mark.parametrize(
    "changed",
    [
        {"np": 0},
        {"np": -3},
        {"workers_min": 0},
        {"workers_min": 9},
        {"np": 1},
        {"np": 9},
        {"start_timeout_s": 0.0},
        {"elastic_timeout_s": -1.0},
        {"cooldown_min_s": 0.0},
        {"cooldown_min_s": 300.0},
        {"reset_limit": -1},
        {"slot_attempts": 0},
        {"host_attempts": 0},
        {"lease_s": 0.0},
        {"idle_s": -1.0},
        {"busy_warning_s": -1.0},
        {"busy_s": -1.0},
        {"dump_s": -1.0},
        {"kill_s": 0.0},
        {"health_check": ""},
        {"health_check": "  "},
        {"health_check_s": 0.0},
        {"bandwidth_factor": 1.0},
        {"bandwidth_factor": -0.1},
    ],
)
def test_contradictions_are_rejected(changed):
    recorded("messages", refusal_of(Settings, **GOOD | changed))
