"""Prometheus metrics of a job, derived from the events and decisions that the journal contains. Makes no decisions.

`JobMetrics` is pure: it receives events and stores numbers. `MetricsServer` serves them over HTTP from its own threads,
so that a scrape never blocks the driver. All names begin with ``elastic_``. Worker labels are limited to live workers.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from elastic.driver import events
from elastic.driver.monitoring.job_rates import JobRates
from elastic.driver.monitoring.job_view import Stage, ViewReader
from elastic.driver.monitoring.page_access import is_ours
from elastic.driver.monitoring.straggler_records import SlowWorkers
from elastic.driver.monitoring.straggler_waits import Histogram, StragglerWaits
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind
from elastic.errors import Invalid
from elastic.protocol.messages import Worker
from elastic.protocol.report_values import Report

VISITORS = 32  # maximum number of concurrent scrapes
VISIT_S = 5.0
PHASES = 64  # maximum number of phases in the recovery metrics, for all kinds of recovery together
# Reported values are exported for ranks below RANKS, and for at most this many names per rank.
RANKS, NAMES = 64, 64
# upper bounds of the histograms' buckets, in seconds
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LOW = events.HealthOutcome.LOW_BANDWIDTH.value
# Reasons for a kill that count as fences, and the corresponding values of the metric's label.
FENCES = {
    ReasonKind.FROZEN: "frozen",
    ReasonKind.IDLE: "stuck",
    ReasonKind.BUSY: "stuck",
    ReasonKind.CUT_OFF: "cut off",
    ReasonKind.OTHER_DIGEST: "digest",
    ReasonKind.DAMAGED: "digest",
    ReasonKind.MISCOMPUTED: "arithmetic",
    ReasonKind.GPU_FAILED: "gpu",
    ReasonKind.GPU_HANGS: "gpu",
    ReasonKind.GPU_BEHIND: "gpu",
    ReasonKind.NO_INIT: "late",
}


@dataclass
class Waits:
    """Number of collectives of one worker in the current world, and the seconds that it reported for them."""

    collectives: int = 0
    waited_s: float = 0.0
    over_s: float = 0.0


def _durations() -> Histogram:
    return Histogram(BOUNDS_S)


class JobMetrics(ViewReader):
    """Metrics of one job. The times of ``spent`` and of its view must be in seconds since 1970."""

    def __init__(self, spent: TimeSpent) -> None:
        # durations of recoveries, by kind of recovery
        self.recoveries: dict[str, Histogram] = defaultdict(_durations)
        # durations of phases, by kind of recovery and phase
        self.phases: dict[tuple[str, str], Histogram] = defaultdict(_durations)
        # number of fences, by label value
        self.fenced: Counter[str] = Counter(dict.fromkeys(FENCES.values(), 0))
        self.health: Counter[str] = Counter({each.value: 0 for each in events.HealthOutcome})
        self.lost = 0
        self.waits: dict[Worker, Waits] = {}
        self.reported: dict[int, dict[str, float]] = {}  # reported values by rank and name
        self.spent = spent
        self.view = spent.view
        self.rates = JobRates(spent)
        self.waited_for = StragglerWaits()
        self.slow = SlowWorkers(self.view)
        self.view.follow(self)

    def report(self, report: Report) -> None:
        """Store the top-level numbers of a report.

        Reports are ignored if the rank is outside the world or is not below RANKS.
        """
        if report.rank >= min(RANKS, len(self.view.ranks)):
            return
        values = self.reported.setdefault(report.rank, {})
        for name, value in report.metrics.items():
            if isinstance(value, int | float) and (name in values or len(values) < NAMES):
                values[name] = float(value)

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        for worker, known in self.view.exited.items():
            self.waits.pop(worker, None)
            self.waited_for.gone(worker)
            fenced = known.why is not None and known.why.kind in FENCES
            expected = known.removed or (known.stage is Stage.KILLED and not fenced)
            self.lost += known.code != 0 and not expected and self.view.end is None
        if isinstance(event, events.WorkerPaced):
            self._paced(event)
        elif isinstance(event, events.WorkerHealthChecked):
            self.health[event.outcome.value] += 1

    def decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.KillWorker(reason=reason) if reason.facts.get("outcome") == LOW:
                self.health[LOW] += 1
            case events.PublishWorld():
                size = len(self.view.ranks)
                self.waited_for.new_world()
                for rank in [rank for rank in self.reported if rank >= size]:
                    del self.reported[rank]
            case events.KillWorker(_, reason) if reason.kind in FENCES:
                self.fenced[FENCES[reason.kind]] += 1
            case events.ReportRecovery(_, kind, _, _, total_ms, phases_ms):
                self.recoveries[kind].add(total_ms / 1e3)
                for phase, ms in phases_ms.items():
                    if (kind, phase) in self.phases or len(self.phases) < PHASES:
                        self.phases[kind, phase].add(ms / 1e3)
            case _:
                pass

    def _paced(self, event: events.WorkerPaced) -> None:
        if event.worker not in self.view.workers or event.generation != self.view.generation:
            return
        waits = self.waits.setdefault(event.worker, Waits())
        waits.collectives += event.collectives
        waits.waited_s += event.waited_s
        waits.over_s += event.over_s
        self.waited_for.paced(event.worker, event.waited_s, event.collectives)


def families(figures: JobMetrics, now: float = 0.0) -> Iterator[Metric]:
    """Yield the metric families for Prometheus. ``now`` is the current time in seconds since 1970."""
    view, rates = figures.view, figures.rates
    stages = Counter(known.stage for known in view.workers.values())
    numbers = ((stage.value, stages[stage]) for stage in Stage)
    yield _gauge("workers", "Worker processes by stage.", "stage", numbers)
    yield GaugeMetricFamily(
        "elastic_generation", "Generation of the current world.", value=view.generation
    )
    yield GaugeMetricFamily(
        "elastic_world_size", "Workers in the current world.", value=len(view.ranks)
    )
    recoveries = HistogramMetricFamily(
        "elastic_recovery_seconds",
        "Time from a detected failure to the last member's first collective in the new world.",
        labels=["kind"],
    )
    for kind, durations in figures.recoveries.items():
        recoveries.add_metric([kind], [*durations.cumulative()], durations.sum_s)
    yield recoveries
    phases = HistogramMetricFamily(
        "elastic_recovery_phase_seconds",
        "Duration of one phase of a recovery, of the slowest member.",
        labels=["kind", "phase"],
    )
    for (kind, phase), durations in figures.phases.items():
        phases.add_metric([kind, phase], [*durations.cumulative()], durations.sum_s)
    yield phases
    yield _counter(
        "fenced_workers",
        "Workers killed so that the others could continue.",
        "reason",
        figures.fenced.items(),
    )
    yield _counter("health_checks", "Health checks by outcome.", "outcome", figures.health.items())
    bandwidth = GaugeMetricFamily(
        "elastic_host_bandwidth_bytes_per_second",
        "Bandwidth of a host to and from its peer, as last measured by the built-in health check.",
        labels=["host", "peer", "direction"],
    )
    for host, each in sorted(view.bandwidth.items()):
        for direction, rate in (("sent", each.sent), ("received", each.received)):
            if rate is not None:
                bandwidth.add_metric([host, each.peer, direction], rate)
    yield bandwidth
    yield GaugeMetricFamily(
        "elastic_unhealthy_slots",
        "Slots whose last health check failed, so that no worker is admitted there.",
        value=len(view.unhealthy),
    )
    yield GaugeMetricFamily(
        "elastic_quarantined_slots",
        "Slots quarantined after wrong gradients: no worker is started in them, or on their hosts.",
        value=len(view.quarantined),
    )
    yield CounterMetricFamily(
        "elastic_started_workers", "Workers started.", value=float(view.started)
    )
    yield CounterMetricFamily(
        "elastic_lost_workers", "Workers that ended with an error.", value=float(figures.lost)
    )
    merged = view.islands.last
    if merged is not None:
        yield CounterMetricFamily(
            "elastic_diloco_merges", "Merges of elastic.DiLoCo.", value=float(merged.merges)
        )
        yield CounterMetricFamily(
            "elastic_diloco_waited_seconds",
            "Time that rank 0 has waited for merges.",
            value=view.islands.waited_s,
        )
        for name, text, number in (
            ("position", "Inner steps of the job at the last merge.", merged.position),
            ("islands", "Islands in the world of the last merge.", merged.islands),
            ("absent_islands", "Late islands of the last merge.", len(merged.absent)),
        ):
            yield GaugeMetricFamily(f"elastic_diloco_{name}", text, value=number)
    yield _gauge(
        "straggler",
        "1 if the worker is a straggler, else 0.",
        "worker",
        ((str(w), w in figures.slow.current) for w in view.workers),
    )
    waited_for = HistogramMetricFamily(
        "elastic_waited_for_seconds",
        "Time that the others wait in collectives for a straggler, averaged over reports.",
        labels=["worker"],
    )
    for worker, waited in figures.waited_for.by_worker.items():
        waited_for.add_metric([str(worker)], [*waited.cumulative()], waited.sum_s)
    yield waited_for
    waits = [(str(worker), waits) for worker, waits in figures.waits.items()]
    for name, text, values in (
        ("collectives", "Collectives completed.", [(w, x.collectives) for w, x in waits]),
        (
            "waited_seconds",
            "Time spent in collectives; low next to high peers marks a straggler.",
            [(w, x.waited_s) for w, x in waits],
        ),
        ("reported_seconds", "Time covered by reports.", [(w, x.over_s) for w, x in waits]),
    ):
        yield _counter(name, text, "worker", values)
    yield _gauge(
        "spent_seconds",
        "Time of all workers by activity, at their last report; lost: training to be repeated, stalled: no"
        " progress.",
        "part",
        msgspec.structs.asdict(figures.spent.total()).items(),
    )
    yield GaugeMetricFamily(
        "elastic_goodput_ratio",
        "Share of the time of all workers spent on training that was not lost.",
        value=figures.spent.goodput(),
    )
    yield _gauge(
        "job_spent_seconds",
        "Time of the job by activity; the parts sum to the time since its driver started.",
        "part",
        figures.spent.stretches().items(),
    )
    yield from _stalls(figures.spent)
    at = figures.spent.now
    for name, text, value in (
        (
            "steps_per_second",
            "Optimizer steps per second; 0 while no step can complete.",
            rates.steps.steps(at),
        ),
        (
            "samples_per_second",
            "Samples per second of all workers, if a loader in the state has a batch size.",
            rates.steps.samples(at, len(view.ranks)),
        ),
        ("step", "Step counter of the state at the newest commit, if it has one.", rates.step),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"elastic_{name}", text, value=value)
    yield CounterMetricFamily("elastic_commits", "Commits of the job.", value=view.commits)
    yield CounterMetricFamily(
        "elastic_durable_commits", "Commits that became durable.", value=view.checkpoints
    )
    if view.checkpoint_at is not None:
        yield GaugeMetricFamily(
            "elastic_last_durable_commit_timestamp_seconds",
            "Time at which the newest durable commit completed, in seconds since 1970.",
            value=view.checkpoint_at,
        )
        yield GaugeMetricFamily(
            "elastic_last_durable_commit_age_seconds",
            "Age of the newest durable commit.",
            value=max(0.0, now - view.checkpoint_at),
        )
    if view.newest is not None:
        for name, text, value in (
            (
                "commit_number",
                "Number of the newest known commit within its generation.",
                view.newest.number,
            ),
            ("commit_generation", "Generation of the newest known commit.", view.newest.generation),
            (
                "last_commit_timestamp_seconds",
                "Time at which the driver received the newest commit, in seconds since 1970.",
                view.newest_at,
            ),
            (
                "commits_per_second",
                "Commits per second, as last measured; falls to 0 while no commit is possible.",
                rates.commits.value(figures.spent.now) or 0.0,
            ),
        ):
            yield GaugeMetricFamily(f"elastic_{name}", text, value=value)
    reported = GaugeMetricFamily(
        "elastic_reported",
        "Last value reported under this name with elastic.report.",
        labels=["name", "rank"],
    )
    for rank, values_of_rank in sorted(figures.reported.items()):
        for name, value in values_of_rank.items():
            reported.add_metric([name, str(rank)], value)
    yield reported


def _stalls(spent: TimeSpent) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "elastic_stalls", "Stalls of training that have ended.", value=spent.stalls.count
    )
    yield CounterMetricFamily(
        "elastic_stalled_seconds",
        "Time of the job in which no rank trained because of a stall, including the current one.",
        value=spent.stretches()["stalled"],
    )
    past = spent.stalls.past
    for name, text, stall in (
        (
            "stall_seconds",
            "Duration of the current stall, for each rank that the others wait for.",
            spent.stall,
        ),
        ("last_stall_seconds", "Duration of the last stall.", past[-1] if past else None),
    ):
        family = GaugeMetricFamily(f"elastic_{name}", text, labels=["rank", "worker", "line"])
        culprits = (
            [] if stall is None else [(str(c.rank), str(c.worker), c.line) for c in stall.culprits]
        )
        if stall is not None:
            for labels in culprits or [("", "", stall.line)]:
                family.add_metric(labels, stall.seconds)
        yield family


def _gauge(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"elastic_{name}", text, labels=[label])
    for which, value in values:
        family.add_metric([which], float(value))
    return family


def _counter(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = CounterMetricFamily(f"elastic_{name}", text, labels=[label])
    for which, value in values:
        family.add_metric([which], float(value))
    return family


def bound_visitors(server: Any) -> None:
    """Limit the connections to an HTTP server that untrusted clients can reach.

    At most VISITORS connections are served concurrently, with a timeout of VISIT_S seconds for each read and write.
    Further connections are closed immediately. Connection errors are not logged.
    """
    inside = threading.BoundedSemaphore(VISITORS)
    begin, process = server.process_request, server.process_request_thread

    class Visit(server.RequestHandlerClass):  # type: ignore[misc]
        timeout = VISIT_S  # timeout for each read and write, in seconds

    def admit(request: Any, address: Any) -> None:
        """Accept a connection if fewer than VISITORS are open, before a thread is started for it."""
        if not inside.acquire(blocking=False):
            server.shutdown_request(request)
            return
        try:
            begin(request, address)
        except BaseException:
            inside.release()
            raise

    def serve(request: Any, address: Any) -> None:
        try:
            process(request, address)
        finally:
            inside.release()

    server.RequestHandlerClass = Visit
    server.process_request, server.process_request_thread = admit, serve
    server.handle_error = lambda request, address: None


def refuse_other_names(server: Any, own: str) -> None:
    """Refuse requests to a loopback server if their Host header names another machine.

    Such a request may come from a website that changed its DNS entry to a loopback address (DNS rebinding).
    """
    names = {"localhost", own.lower(), socket.gethostname().lower()}
    app = server.get_app()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        # Browsers always send Host, so a request without it cannot result from DNS rebinding.
        if host is None or is_ours(host, names):
            return app(environ, start_response)  # type: ignore[no-any-return]
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [
            b"use the address, or localhost: other host names are refused to prevent DNS rebinding\n"
        ]

    server.set_app(answer)


class MetricsServer(Collector):
    """Server of the metrics of one job.

    Args:
        address: address to listen on.
        port: port to listen on. 0 means any free port.
        figures: the metrics to serve.
        changing: lock that protects ``figures``. The driver's thread holds it while changing them, and scrapes hold it
            while reading.

    Raises:
        Invalid: the address cannot be bound.
    """

    def __init__(
        self, address: str, port: int, figures: JobMetrics, changing: threading.Lock
    ) -> None:
        self._figures = figures
        self._changing = changing
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise Invalid(
                f"metrics can't be served on {address} port {port}: {error.strerror or error}. Pass another"
                " --metrics-port or --metrics-host"
            ) from None
        bound_visitors(self._server)
        if ipaddress.ip_address(str(self._server.server_address[0])).is_loopback:
            refuse_other_names(self._server, address)
        self.port = self._server.server_port

    def report(self, report: Report) -> None:
        with self._changing:
            self._figures.report(report)

    def collect(self) -> Iterable[Metric]:
        with self._changing:
            # Extend the accounted time to the present; the accounted events stay the same.
            self._figures.spent.go_on(time.time())
            return [*families(self._figures, time.time())]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()
