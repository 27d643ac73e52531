"""Each recovery and each change of the world as a trace of OpenTelemetry, a span with its phases as children.

The SDK is asked for by `--opentelemetry` and configured by its own variables: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS and
the like, OTEL_TRACES_EXPORTER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*. What is
sent waits in a queue of bounded length, from which a thread of the SDK sends: the driver never waits for a collector,
and what none takes is lost.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic.driver.events import Action, ReportRecovery
from elastic.driver.sinks import Log
from elastic.errors import Invalid

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

CLOSE_S = 3.0  # for what is left to be sent at the end of a job
INSTALL = "pip install 'hvd-elastic[opentelemetry]'"


def phases_of(report: ReportRecovery) -> list[tuple[str, float, float]]:
    """Phase, begin and end, milliseconds since the cause was noticed, all within the recovery.

    Each is as long as the member took that was slowest at it. Until the world is published (gathered) members come back
    from what they did (raised), restore their commit (restored), and wait for the world (waited); then they make their
    groups (formed) while the state is copied (synced), and step.
    """
    total, told = report.total_ms, report.phases_ms
    world = told.get("gathered", 0.0)
    raised = told.get("raised", 0.0)
    begins = {
        "restored": raised,
        "waited": world - told.get("waited", 0.0),
        "synced": world,
        "formed": world,
        "first collective": total - told.get("first collective", 0.0),
    }
    found = []
    for phase, ms in told.items():
        begin = min(max(0.0, begins.get(phase, 0.0)), total)
        found.append((phase, begin, min(begin + ms, total)))
    return found


class RecoveryTraces:
    """Of one job. ``processors``: where spans go, in place of what the variables say."""

    def __init__(
        self,
        job: str,
        environ: Mapping[str, str],
        log: Log,
        *,
        processors: Sequence[SpanProcessor] | None = None,
    ) -> None:
        """Raises Invalid where what is needed is not installed."""
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace import set_span_in_context
        except ModuleNotFoundError:
            raise Invalid(f"--opentelemetry needs OpenTelemetry's SDK: {INSTALL}") from None
        if processors is None:
            processors = _processors(environ)
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "hvd-elastic"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("hvd-elastic")
        self._told = TroubleToldOnce(log)
        self._below = set_span_in_context
        self._job = job
        self._epoch: float | None = None  # what the journal's clock has to be added to

    def note(self, actions: Sequence[Action], now: float) -> None:
        """What was decided, ``now`` by the clock of the journal."""
        if self._epoch is None:
            self._epoch = time.time() - now
        for action in actions:
            if isinstance(action, ReportRecovery):
                self._record(action, self._epoch + now)

    def _record(self, report: ReportRecovery, ended: float) -> None:
        began_ns = int((ended - report.total_ms / 1e3) * 1e9)
        about: dict[str, Any] = {
            "elastic.job": self._job,
            "elastic.generation": report.generation,
            "elastic.world.size": report.size,
            "elastic.reason": str(report.reason),
            "elastic.copied_bytes": report.copied_bytes,
        }
        span = self._tracer.start_span(report.kind, start_time=began_ns, attributes=about)
        context = self._below(span)
        for phase, begin, end in phases_of(report):
            child = self._tracer.start_span(phase, context, start_time=began_ns + int(begin * 1e6))
            child.end(began_ns + int(end * 1e6))
        span.end(began_ns + int(report.total_ms * 1e6))

    def close(self) -> None:
        """What is left is sent, within CLOSE_S."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self._told.close()


class TroubleToldOnce(logging.Handler):
    """What the SDK has to say of a collector that does not answer: the first of it is a line of the driver's log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._said = False
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._propagated, self._logger.propagate = self._logger.propagate, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            self._log("warning", f"traces can't be sent (logged once): {record.getMessage()}")

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
        super().close()


def _processors(environ: Mapping[str, str]) -> list[SpanProcessor]:
    """Those that the variables name: as a rule one, that sends by OTLP."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    found: list[SpanProcessor] = []
    for name in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        wanted = name.strip()
        if wanted == "none":
            continue
        if wanted == "otlp":
            protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
                "OTEL_EXPORTER_OTLP_PROTOCOL"
            )
            wanted = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        there = importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=wanted)
        if not there:
            install = f"pip install opentelemetry-exporter-{wanted.replace('_', '-')}"
            if wanted == "otlp_proto_http":
                install = INSTALL
            raise Invalid(f"--opentelemetry: exporter {wanted} is not installed: {install}")
        try:
            found.append(BatchSpanProcessor(next(iter(there)).load()()))
        # A variable that it does not understand, a certificate that is not there.
        except Exception as error:
            raise Invalid(
                f"--opentelemetry: exporter {wanted} can't be created: {error}"
            ) from error
    return found
