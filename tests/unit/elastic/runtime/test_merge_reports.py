"""Reports of merges to the driver: at most one a second, unless other islands are late."""

from __future__ import annotations

import time

import pytest

from elastic.protocol.messages import Merged
from elastic.rendezvous import worker_settings
from elastic.runtime.merge_reports import MERGE_REPORT_S
from elastic.runtime.recovery import Phase, Recovery
from elastic.runtime.worker_runtime import WorkerRuntime


def training(monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerRuntime, list[float], list[Merged]]:
    """Return the runtime of a worker in generation 2, its clock, and the reports that it sends."""
    now, sent = [100.0], list[Merged]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rt = WorkerRuntime(worker_settings.read({}), None)
    rt.session.recovery = Recovery(phase=Phase.TRAINING, generation=2, provisional=False)
    rt.session.send = sent.append  # type: ignore[method-assign, assignment]
    return rt, now, sent


def test_merge_report_when_due_or_late_islands_change_then_contains_the_wait_since_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rt, now, sent = training(monkeypatch)
    rt.report_merge(1, 10, ["us", "eu"], [], 0.25)
    rt.report_merge(2, 20, ["us", "eu"], [], 0.5)  # too soon
    rt.report_merge(3, 30, ["us", "eu"], ["us"], 1.0)
    rt.report_merge(4, 40, ["us", "eu"], ["us"], 2.0)  # too soon
    now[0] += MERGE_REPORT_S
    rt.report_merge(5, 50, ["eu"], ["us"], 4.0)
    assert sent == [
        Merged(2, 1, 10, 2, [], 0.25, ["eu", "us"]),
        Merged(2, 3, 30, 2, ["us"], 1.5, []),
        Merged(2, 5, 50, 1, ["us"], 6.0, ["eu"]),
    ]


@pytest.mark.parametrize(
    "after_s, generation, named", [(2.0, 2, False), (2.0, 3, True), (60.0, 2, True)]
)
def test_merge_report_names_the_islands_again_in_another_generation_and_each_minute(
    monkeypatch: pytest.MonkeyPatch, after_s: float, generation: int, named: bool
) -> None:
    """The driver may be another one by then."""
    rt, now, sent = training(monkeypatch)
    rt.report_merge(1, 10, ["us", "eu"], [], 0.0)
    now[0] += after_s
    rt.session.recovery = Recovery(phase=Phase.TRAINING, generation=generation, provisional=False)
    rt.report_merge(2, 20, ["us", "eu"], [], 0.0)
    assert bool(sent[-1].names) is named
