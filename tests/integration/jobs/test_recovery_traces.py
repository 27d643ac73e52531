"""`--opentelemetry`: a collector that speaks OTLP hears of a recovery of a real job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from harness.history import TRAINING, History, kill_slot, sizes

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = [pytest.mark.forked, pytest.mark.nightly]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it was sent."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """To nobody."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_collector_hears_of_a_recovery(job, collector):
    address, spans = collector
    env = {
        "ELASTIC_DIGESTS": "1",
        "ENDS": "end",
        "PACE": "0.01",
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
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
    [root] = [span for span in spans if span.name == "recovery"]
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert [span.name for span in children] == list(report["phases_ms"])
    took_ms = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6
    assert took_ms == pytest.approx(report["total_ms"], abs=0.01)
    assert all(span.trace_id == root.trace_id for span in children)
