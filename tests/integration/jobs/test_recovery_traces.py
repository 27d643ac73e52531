"""`--opentelemetry`: an OTLP collector receives the recovery of a real job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.history import TRAINING, History, kill_slot, sizes
from harness.otlp_collector import Traces, otlp_collector

pytestmark = [pytest.mark.forked, pytest.mark.nightly]


@pytest.fixture
def collector() -> Iterator[Traces]:
    with otlp_collector() as traces:
        yield traces


def test_a_collector_receives_a_recovery(job, collector):
    env = {
        "ELASTIC_DIGESTS": "1",
        "ENDS": "end",
        "PACE": "0.01",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    }
    flags = "-np 2 --min-np 1 --opentelemetry --blacklist-cooldown-range 60 60"
    training = job(flags, TRAINING, env=env)
    training.until(lambda: len(sizes(training)) == 2, "a world of elastic.run")
    kill_slot(training, 1)
    training.wait_for_world(1)
    training.wait_for_action("ReportRecovery", count=1)
    training.until(
        lambda: any(r["kind"] == "recovery" for r in training.actions("ReportRecovery")),
        "a recovery",
    )
    (training.folder / "end").touch()
    training.succeed()
    History(training).check_commits_kept()
    [report] = [r for r in training.actions("ReportRecovery") if r["kind"] == "recovery"]
    spans = collector.spans
    [root] = [span for span in spans if span.name == "recovery"]
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert [span.name for span in children] == list(report["phases_ms"])
    took_ms = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6
    assert took_ms == pytest.approx(report["total_ms"], abs=0.01)
    assert collector.services == {"hvd-elastic"}
    assert all(span.trace_id == root.trace_id for span in children)
