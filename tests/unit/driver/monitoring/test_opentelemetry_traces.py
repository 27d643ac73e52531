"""Recoveries as traces: from decisions to the spans in the SDK's in-memory exporter."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from elastic.driver.events import ReportRecovery
from elastic.driver.monitoring import opentelemetry_traces
from elastic.driver.monitoring.opentelemetry_traces import RecoveryTraces, phases_of
from elastic.driver.reasons import as_sentence
from elastic.errors import Invalid
from harness.golden import raises, recorded
from harness.otlp_collector import otlp_collector

PHASES = {
    "gathered": 40.0,
    "raised": 10.0,
    "restored": 5.0,
    "waited": 20.0,
    "formed": 8.0,
    "synced": 30.0,
    "first collective": 4.0,
}
REPORT = ReportRecovery(3, "recovery", as_sentence("lost h:1#1"), 2, 80.0, PHASES, 1024)


def silent(level: str, text: str) -> None:
    raise AssertionError(text)


def spans_of(*reports: ReportRecovery, at: float = 100.0) -> list[ReadableSpan]:
    kept = InMemorySpanExporter()
    traces = RecoveryTraces("bert", {}, silent, processors=[SimpleSpanProcessor(kept)])
    for report in reports:
        traces.decided(report, at)
    traces.close()
    return list(kept.get_finished_spans())


def test_recovery_is_a_span_with_its_phases_as_children():
    *children, root = spans_of(REPORT, at=100.0)
    assert root.name == "recovery" and root.parent is None
    assert dict(root.attributes or {}) == {
        "elastic.job": "bert",
        "elastic.generation": 3,
        "elastic.world.size": 2,
        "elastic.reason": "lost h:1#1",
        "elastic.copied_bytes": 1024,
    }
    assert root.start_time and root.end_time
    assert root.end_time - root.start_time == 80_000_000
    assert root.end_time == 100_000_000_000
    assert [child.name for child in children] == [*PHASES]
    for child in children:
        assert child.parent is not None and root.context is not None
        assert child.parent.span_id == root.context.span_id
        assert child.start_time and child.end_time
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time
    assert root.resource.attributes["service.name"] == "hvd-elastic"


def test_phases_have_their_times():
    assert phases_of(REPORT) == [
        ("gathered", 0.0, 40.0),
        ("raised", 0.0, 10.0),
        ("restored", 10.0, 15.0),
        ("waited", 20.0, 40.0),
        ("formed", 40.0, 48.0),
        ("synced", 40.0, 70.0),
        ("first collective", 76.0, 80.0),
    ]


def test_no_phase_exceeds_its_recovery_for_any_report():
    phases = {"gathered": 90.0, "waited": 500.0, "synced": 70.0, "first collective": 99.0, "x": 7.0}
    report = ReportRecovery(3, "change", as_sentence("joined"), 2, 80.0, phases, 0)
    found = phases_of(report)
    assert [phase for phase, _, _ in found] == [*phases]
    assert all(0.0 <= begin <= end <= 80.0 for _, begin, end in found)


def test_each_recovery_is_a_separate_trace():
    spans = spans_of(REPORT, ReportRecovery(4, "change", as_sentence("joined"), 3, 5.0, {}, 0))
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == ["recovery", "change"]
    assert len({span.context.trace_id for span in spans if span.context}) == 2


def test_service_name_set_by_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    assert spans_of(REPORT)[0].resource.attributes["service.name"] == "training"


class Stuck(SpanExporter):
    """A collector that accepts nothing until it is released."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go.wait(20.0)
        logging.getLogger("opentelemetry.test").warning("nobody answers")
        return SpanExportResult.FAILURE


def test_unresponsive_collector_blocks_neither_decisions_nor_the_close(monkeypatch):
    monkeypatch.setattr(opentelemetry_traces, "CLOSE_S", 0.05)
    stuck, log = Stuck(), []
    processor = BatchSpanProcessor(stuck, max_queue_size=16, max_export_batch_size=8)
    traces = RecoveryTraces(
        "bert", {}, lambda level, text: log.append(text), processors=[processor]
    )
    for _ in range(8):
        traces.decided(REPORT, 100.0)
    assert stuck.asked.wait(10.0)
    began = time.monotonic()
    for _ in range(100):
        traces.decided(REPORT, 100.0)  # the queue is full, so they are dropped
    traces.close()
    assert time.monotonic() - began < 5.0
    stuck.go.set()


def test_collector_failure_is_logged_once():
    logged: list[str] = []
    traces = RecoveryTraces("bert", {}, lambda level, text: logged.append(text), processors=[])
    for _ in range(3):
        logging.getLogger("opentelemetry.exporter").warning("%s refuses", "http://localhost:4318")
    traces.close()
    recorded("log", logged)


def test_missing_sdk_is_logged(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with raises(Invalid):
        RecoveryTraces("bert", {}, silent)


@pytest.mark.parametrize(
    "environ", [{"OTEL_TRACES_EXPORTER": "jaeger"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}]
)
def test_missing_exporter_is_logged(environ):
    with raises(Invalid):
        RecoveryTraces("bert", environ, silent)


@pytest.mark.parametrize(("exporter", "names"), [("otlp", {"recovery", *PHASES}), ("none", set())])
def test_exporter_named_by_the_user_sends_spans_unless_it_is_none(monkeypatch, exporter, names):
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        traces = RecoveryTraces("bert", {"OTEL_TRACES_EXPORTER": exporter}, silent)
        traces.decided(REPORT, 100.0)
        traces.close()
    assert {span.name for span in collector.spans} == names
