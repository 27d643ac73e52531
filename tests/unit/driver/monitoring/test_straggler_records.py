"""Stragglers as ``explain`` and the metrics show them: speed, duration, and what became of them."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver.events import Action
from elastic.driver.monitoring.explain.findings import Advice, FindingKind
from elastic.driver.monitoring.straggler_records import SlowEnd
from harness.conversation import exited, paced, returned
from harness.explained import ExplainedConversation

SLOW = "h:1"


class Job(ExplainedConversation):
    """Three members that train in generation 2, one of them slowly."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(3, slots=4 if settings else 3, workers_min=2, workers_max=3, **settings)

    def reports(self, share: float = 0.0) -> list[Action]:
        """Each member reports: the others wait 60 % of their time, the slow one ``share``."""
        others = [str(each)[:3] for each in self.m.worlds.members if str(each)[:3] != SLOW]
        return self.tell(
            *(paced(name, self.m.generation, 0.6) for name in others),
            paced(SLOW, self.m.generation, share),
        )

    @property
    def slow(self) -> dict[str, Any]:
        [facts] = self.found(FindingKind.SLOW)
        return facts


def test_slow_worker_when_named_then_explain_has_its_speed_and_duration():
    job = Job()
    assert not job.found(FindingKind.SLOW)
    job.reports()
    job.wait(40)
    job.reports()
    facts = job.slow
    assert (facts["worker"], facts["rank"], facts["end"]) == ("h:1#1", 1, None)
    assert facts["speed"] == pytest.approx(0.4) and 39.9 < facts["seconds"] < 40.1
    assert facts["others_wait"] == pytest.approx(0.6)


def test_slow_worker_when_slow_twice_then_the_periods_are_added():
    job = Job()
    for _ in range(2):
        job.reports()
        job.wait(20)
        job.reports(share=0.6)
        job.wait(100)
    facts = job.slow
    assert (facts["periods"], facts["end"]) == (2, SlowEnd.RECOVERED.value)
    assert 39.9 < facts["seconds"] < 40.2


def test_slow_worker_when_lost_then_its_period_ends():
    job = Job()
    job.reports()
    job.wait(20)
    job.tell(exited(SLOW, code=-9))
    job.wait(50)
    assert job.slow["end"] == SlowEnd.LEFT.value and 19.9 < job.slow["seconds"] < 20.1


def test_slow_worker_when_the_world_changes_then_its_speed_is_measured_again():
    job = Job()
    job.reports()
    job.wait(20)
    job.tell(exited("h:2", code=-9))
    job.ready("h:0", SLOW, running=True, commit=(2, 3))
    job.wait(12.0)
    assert job.m.generation == 3
    assert job.slow["end"] == SlowEnd.WORLD_ENDED.value
    job.resume()
    job.reports()
    assert (job.slow["end"], job.slow["periods"]) == (None, 2)


def test_slow_worker_when_a_minute_was_lost_then_there_is_an_advice():
    job = Job()
    job.reports()
    job.wait(55)
    kinds = [each["advice"] for each in job.found(FindingKind.ADVICE)]
    assert Advice.LOOK_AT_SPEED.value not in kinds
    job.wait(10)
    [facts] = [
        each
        for each in job.found(FindingKind.ADVICE)
        if each["advice"] == Advice.LOOK_AT_SPEED.value
    ]
    assert facts["worker"] == "h:1#1"


def test_slow_worker_when_replaced_by_a_standby_then_explain_reports_the_replacement():
    job = Job(standbys=1, replace_stragglers=True)
    job.connect("h:3")
    job.ready("h:3")
    for _ in range(2):
        job.reports()
        job.wait(1.0)
    job.stop_all(4)
    job.wait(1.0)
    assert job.slow["end"] == SlowEnd.REPLACED.value


def test_slow_worker_when_the_job_ends_then_its_period_ends():
    job = Job()
    job.reports()
    job.wait(20)
    job.tell(*(returned(name, 2) for name in ("h:0", SLOW, "h:2")))
    job.wait(30)
    assert job.slow["end"] == SlowEnd.JOB_ENDED.value and 19.9 < job.slow["seconds"] < 20.1
