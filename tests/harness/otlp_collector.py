"""A trace collector with OTLP over HTTP, in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

REQUESTS = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"


@dataclass
class Traces:
    """Received data at ``address``: spans, and the names of their services."""

    address: str
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)


@contextlib.contextmanager
def otlp_collector() -> Iterator[Traces]:
    """Run a collector. Skips the test if OpenTelemetry is not installed."""
    requests = pytest.importorskip(REQUESTS)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = requests.ExportTraceServiceRequest.FromString(body)
            for each in request.resource_spans:
                about = {item.key: item.value.string_value for item in each.resource.attributes}
                traces.services.add(about["service.name"])
                for scope in each.scope_spans:
                    traces.spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """To nobody."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    traces = Traces(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield traces
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
