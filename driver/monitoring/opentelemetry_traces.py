"""OpenTelemetry traces of recoveries and planned changes. Each change is a span, and its phases are child spans.

Enabled by `--opentelemetry`. The SDK is configured by its own environment variables: OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_HEADERS and others of this form, OTEL_TRACES_EXPORTER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_BSP_*. Spans are stored in a bounded queue, and a thread of the SDK sends them. The driver
therefore never waits for a collector, but spans that cannot be sent are lost.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic.driver.events import Action, ReportRecovery
from elastic.driver.monitoring.job_view import ViewReader
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

CLOSE_S = 3.0  # timeout for sending the remaining spans when a job ends, in seconds
INSTALL = "pip install 'hvd-elastic[opentelemetry]'"


def phases_of(report: ReportRecovery) -> list[tuple[str, float, float]]:
    """Return the phases of a recovery, each with its start and end in milliseconds since the cause was detected.

    The phases before the world is published are: gathered, raised (members abort their work), restored (they restore
    their commit) and waited (they wait for the world). Afterwards, members create their groups (formed) while the state
    is copied (synced), and complete their first collective. The duration of a phase is that of the slowest member.
    Phases are cut off at the end of the recovery.
    """
    total, phases = report.total_ms, report.phases_ms
    world = phases.get("gathered", 0.0)
    raised = phases.get("raised", 0.0)
    begins = {
        "restored": raised,
        "waited": world - phases.get("waited", 0.0),
        "synced": world,
        "formed": world,
        "first collective": total - phases.get("first collective", 0.0),
    }
    found = []
    for phase, ms in phases.items():
        begin = min(max(0.0, begins.get(phase, 0.0)), total)
        found.append((phase, begin, min(begin + ms, total)))
    return found


class RecoveryTraces(ViewReader):
    """Exporter of the OpenTelemetry traces of one job. Times are in seconds since 1970.

    Args:
        processors: span processors (default: those configured by the environment variables).
    """

    def __init__(
        self,
        job: str,
        environ: Mapping[str, str],
        log: Log,
        *,
        processors: Sequence[SpanProcessor] | None = None,
    ) -> None:
        """Create the tracer.

        Raises:
            Invalid: the SDK or the exporter is not installed.
        """
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
        self._first_warnings = ExportErrorHandler(log)
        self._below = set_span_in_context
        self._job = job

    def decided(self, action: Action, now: float) -> None:
        if isinstance(action, ReportRecovery):
            self._record(action, now)

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
        """Send the remaining spans, for at most CLOSE_S seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self._first_warnings.close()


class ExportErrorHandler(logging.Handler):
    """Handler that writes the SDK's first warning, for example about an unreachable collector, to the driver's log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._logged = False
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._propagated, self._logger.propagate = self._logger.propagate, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._logged:
            self._logged = True
            self._log("warning", f"traces could not be sent (logged once): {record.getMessage()}")

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
        super().close()


def _processors(environ: Mapping[str, str]) -> list[SpanProcessor]:
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
        exporters = importlib.metadata.entry_points(
            group="opentelemetry_traces_exporter", name=wanted
        )
        if not exporters:
            install = f"pip install opentelemetry-exporter-{wanted.replace('_', '-')}"
            if wanted == "otlp_proto_http":
                install = INSTALL
            raise Invalid(
                f"the OpenTelemetry exporter {wanted} (--opentelemetry) is not installed: {install}"
            )
        try:
            found.append(BatchSpanProcessor(next(iter(exporters)).load()()))
        # The SDK raises exceptions of various types, for example for an invalid variable or a missing certificate.
        except Exception as error:
            raise Invalid(
                f"the OpenTelemetry exporter {wanted} (--opentelemetry) can't be created: {error}. Check its OTEL_"
                " variables"
            ) from error
    return found
