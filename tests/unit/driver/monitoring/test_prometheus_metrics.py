"""Prometheus metrics: from a job's events to the lines of a scrape."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import urllib.request
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from elastic.driver import events
from elastic.driver.events import (
    Action,
    BandwidthMeasured,
    CheckpointMade,
    EndJob,
    Event,
    HealthOutcome,
    HostLost,
    KillWorker,
    LetGo,
    ReportRecovery,
    TimePassed,
    WelcomeWorker,
    WorkerConnected,
    WorkerDigested,
    WorkerExited,
    WorkerHealthChecked,
    WorkerMerged,
    WorkerPaced,
    WorkerProgressed,
    WorkerReady,
    WorkerReturned,
    WorkerSpent,
)
from elastic.driver.membership.failure_detection.gpu_hangs import Hang, HangFinding, hang_of_one
from elastic.driver.monitoring.job_view import JobView, Stage
from elastic.driver.monitoring.prometheus_metrics import NAMES, JobMetrics, MetricsServer, families
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.errors import Invalid
from elastic.protocol.messages import Commit, Place, Times, Worker
from elastic.protocol.report_values import Report
from harness.golden import raises, recorded
from harness.published import STORE, published, starts

A, B, C = (Worker("localhost", slot) for slot in range(3))


def note(
    figures: JobMetrics, event: Event, actions: Sequence[Action] = (), now: float = 0.0
) -> None:
    figures.view.note(event, actions, now)


def server(address: str, port: int = 0) -> MetricsServer:
    return MetricsServer(address, port, JobMetrics(TimeSpent(JobView())), threading.Lock())


def training(*workers: Worker) -> JobMetrics:
    figures = JobMetrics(TimeSpent(JobView()))
    note(figures, TimePassed(), starts(*workers))
    for worker in workers:
        note(figures, WorkerConnected(worker, 7), [])
    note(figures, WorkerReady(workers[0], 0, None, STORE), [published(1, *workers)])
    return figures


def lines(figures: JobMetrics) -> set[str]:
    class All(Collector):
        def collect(self):
            return [*families(figures)]

    registry = CollectorRegistry()
    registry.register(All())
    text = generate_latest(registry).decode()
    return {line for line in text.splitlines() if not line.startswith("#")}


def test_workers_are_counted_by_stage_and_the_world_is_shown():
    figures = training(A, B, C)
    note(figures, WorkerReturned(C, 1), [])
    assert {
        'elastic_workers{stage="training"} 2.0',
        'elastic_workers{stage="returned"} 1.0',
        'elastic_workers{stage="starting"} 0.0',
        "elastic_generation 1.0",
        "elastic_world_size 3.0",
        "elastic_started_workers_total 3.0",
    } <= lines(figures)


def test_host_with_low_bandwidth_is_counted_and_unhealthy_until_its_worker_is_admitted():
    figures, low = training(A, B), '{outcome="low_bandwidth"}'
    facts = {"slot": "localhost:2", "outcome": "low_bandwidth", "code": None, "line": "slow"}
    [start] = starts(C)
    note(figures, TimePassed(), [start])
    measured = BandwidthMeasured("localhost", "other", 1.0, 2.0)
    note(figures, measured, [KillWorker(C, because(ReasonKind.UNHEALTHY, **facts))])
    assert {
        'elastic_host_bandwidth_bytes_per_second{direction="sent",host="localhost",peer="other"} 1.0',
        'elastic_host_bandwidth_bytes_per_second{direction="received",host="localhost",peer="other"}'
        " 2.0",
        f"elastic_health_checks_total{low} 1.0",
        "elastic_unhealthy_slots 1.0",
    } <= lines(figures)
    after = msgspec.structs.replace(C, incarnation=2)
    note(figures, WorkerExited(C, -9), starts(after))
    note(figures, WorkerHealthChecked(after, HealthOutcome.PASSED))
    assert "elastic_unhealthy_slots 1.0" in lines(figures), "its bandwidth is measured afterwards"
    note(
        figures,
        WorkerConnected(after, 7),
        [WelcomeWorker(after, Place(0, 3, 0, 3, 0, 1), True, True)],
    )
    assert "elastic_unhealthy_slots 0.0" in lines(figures)


def test_merges_of_diloco_are_shown_with_the_number_of_late_islands():
    figures = training(A, B)
    assert not any(line.startswith("elastic_diloco") for line in lines(figures))
    note(figures, WorkerMerged(A, 1, 12, 600, 3, ["us"], 1.5))
    assert {
        "elastic_diloco_waited_seconds_total 1.5",
        "elastic_diloco_merges_total 12.0",
        "elastic_diloco_position 600.0",
        "elastic_diloco_islands 3.0",
        "elastic_diloco_absent_islands 1.0",
    } <= lines(figures)


def test_frozen_worker_is_killed_and_lost_once():
    figures = training(A, B)
    note(
        figures,
        TimePassed(),
        [KillWorker(B, because(ReasonKind.FROZEN, how="stopped by a signal"))],
    )
    assert 'elastic_workers{stage="killed"} 1.0' in lines(figures)
    note(figures, WorkerExited(B, -9), [published(2, A)])
    note(figures, WorkerExited(B, -9), [])
    assert {
        'elastic_fenced_workers_total{reason="frozen"} 1.0',
        'elastic_fenced_workers_total{reason="stuck"} 0.0',
        "elastic_lost_workers_total 1.0",
        "elastic_generation 2.0",
        'elastic_workers{stage="training"} 1.0',
        'elastic_workers{stage="killed"} 0.0',
    } <= lines(figures)


def test_workers_of_a_lost_host_are_lost_and_in_no_stage():
    figures = training(A, B)
    note(figures, WorkerPaced(B, 1, 300, 1.0, 30.0), [])
    note(figures, HostLost("localhost", "no answer"))
    assert "elastic_lost_workers_total 2.0" in lines(figures)
    assert {line for line in lines(figures) if line.startswith("elastic_workers{")} == {
        f'elastic_workers{{stage="{stage.value}"}} 0.0' for stage in Stage
    }
    assert not [line for line in lines(figures) if "localhost:1#1" in line]


def test_released_worker_is_not_lost():
    figures = training(A, B, C)
    note(
        figures,
        TimePassed(),
        [
            LetGo(A, as_sentence("its host left")),
            KillWorker(B, as_sentence("the host left the list")),
        ],
    )
    note(figures, WorkerExited(A, 1), [])
    note(figures, WorkerExited(B, -9), [EndJob(0, as_sentence("done"))])
    note(figures, WorkerExited(C, -15), [])
    assert "elastic_lost_workers_total 0.0" in lines(figures)
    assert sum(figures.fenced.values()) == 0


def test_every_kill_has_a_kind():
    figures = training(A)
    for hang in Hang:
        hung = hang_of_one(HangFinding(hang, "gradients", 7, 10.0))
        note(figures, TimePassed(), [KillWorker(A, hung)])
    for why in (
        ReasonKind.IDLE,
        ReasonKind.BUSY,
        ReasonKind.CUT_OFF,
        ReasonKind.OTHER_DIGEST,
        ReasonKind.MISCOMPUTED,
        ReasonKind.NO_INIT,
        ReasonKind.JOB_ENDED,
    ):
        note(figures, TimePassed(), [KillWorker(A, because(why))])
    counted = {"frozen": 0, "stuck": 2, "cut off": 1, "digest": 1, "gpu": len(Hang), "late": 1}
    counted["arithmetic"] = 1
    assert figures.fenced == counted


def test_recoveries_are_a_histogram():
    figures = training(A, B)
    for ms in (20.0, 80.0, 40_000.0):
        report = ReportRecovery(2, "recovery", as_sentence("lost b"), 1, ms, {}, 0)
        note(figures, TimePassed(), [report])
    assert {
        'elastic_recovery_seconds_bucket{kind="recovery",le="0.01"} 0.0',
        'elastic_recovery_seconds_bucket{kind="recovery",le="0.025"} 1.0',
        'elastic_recovery_seconds_bucket{kind="recovery",le="30.0"} 2.0',
        'elastic_recovery_seconds_bucket{kind="recovery",le="+Inf"} 3.0',
        'elastic_recovery_seconds_count{kind="recovery"} 3.0',
        'elastic_recovery_seconds_sum{kind="recovery"} 40.1',
    } <= lines(figures)


def test_straggler_is_shown_until_the_world_changes():
    figures = training(A, B, C)
    for worker, waited_s in ((A, 25.0), (B, 26.0), (C, 1.0)):
        note(figures, WorkerPaced(worker, 1, 300, waited_s, 30.0), [])
    about = because(ReasonKind.STRAGGLERS, workers=str(C), speeds="0.16", over="")
    note(figures, TimePassed(), [events.Report("warning", "one is slow", about)])
    assert {
        'elastic_straggler{worker="localhost:2#1"} 1.0',
        'elastic_straggler{worker="localhost:0#1"} 0.0',
        'elastic_waited_seconds_total{worker="localhost:0#1"} 25.0',
        'elastic_reported_seconds_total{worker="localhost:0#1"} 30.0',
        'elastic_collectives_total{worker="localhost:0#1"} 300.0',
    } <= lines(figures)
    note(figures, TimePassed(), [published(2, A, B, C)])
    note(figures, WorkerPaced(A, 1, 300, 1.0, 30.0), [])  # of the previous world
    assert 'elastic_straggler{worker="localhost:2#1"} 0.0' in lines(figures)


def test_exited_workers_leave_no_lines():
    figures = training(A, B)
    note(figures, WorkerPaced(B, 1, 300, 1.0, 30.0), [])
    note(figures, WorkerExited(B, 1), [])
    assert not [line for line in lines(figures) if "localhost:1#1" in line]


def test_newest_commit_and_the_commit_rate_are_shown():
    figures = training(A, B)
    assert not [line for line in lines(figures) if "elastic_commit_" in line]
    note(figures, WorkerPaced(A, 1, 300, 1.0, 30.0, 60, Commit(1, 60)), [], 1000.0)
    note(figures, WorkerDigested(A, 1, Commit(1, 150), 17), [], 1030.0)
    assert {
        "elastic_commits_total 150.0",
        "elastic_commit_number 150.0",
        "elastic_commit_generation 1.0",
        "elastic_last_commit_timestamp_seconds 1030.0",
        "elastic_commits_per_second 3.0",
    } <= lines(figures)


def test_steps_and_samples_are_counted_on_rank_0_without_script_changes():
    figures = training(A, B)
    for worker, steps, at in ((A, 100, 110.0), (B, 7, 111.0), (A, 150, 115.0)):
        commit = Commit(1, steps // 10)
        spent = WorkerSpent(
            worker, 1, Times(), "training", commit, step=steps, steps=steps, batch=8
        )
        note(figures, spent, [], at)
    assert {
        "elastic_steps_per_second 10.0",
        "elastic_samples_per_second 160.0",
        "elastic_step 150.0",
    } <= lines(figures)


def test_world_and_stalls_of_the_previous_driver_are_shown():
    figures = JobMetrics(TimeSpent(JobView()))
    figures.view.adopt({A: (0, 0), B: (0, 1)}, 4, 990.0)
    note(figures, WorkerProgressed(A, 4, 7, "gradients", 12.0), [], 1000.0)
    assert {
        "elastic_generation 4.0",
        "elastic_world_size 2.0",
        'elastic_stall_seconds{line="",rank="1",worker="localhost:1#1"} 12.0',
        'elastic_workers{stage="training"} 2.0',
    } <= lines(figures)


def test_durable_commits_are_shown():
    figures = training(A, B)
    assert "elastic_durable_commits_total 0.0" in lines(figures)
    note(figures, CheckpointMade(Commit(1, 60)), [], 1030.0)
    note(figures, CheckpointMade(Commit(1, 120)), [], 1090.0)
    assert {
        "elastic_durable_commits_total 2.0",
        "elastic_commit_number 120.0",
        "elastic_last_durable_commit_timestamp_seconds 1090.0",
    } <= lines(figures)


def test_reported_numbers_are_gauges_and_limited():
    def report(rank: int, **metrics) -> Report:
        return Report(rank, 2, 1, "h:0#1", metrics, 1.0)

    figures = training(A, B)
    figures.report(report(0, loss=0.5, step=7, note="text", nested={"x": 1.0}))
    figures.report(report(1, loss=float("nan")))
    figures.report(report(2, loss=1.0))  # no such rank
    figures.report(report(0, loss=0.25))
    found = {line for line in lines(figures) if line.startswith("elastic_reported{")}
    assert found == {
        'elastic_reported{name="loss",rank="0"} 0.25',
        'elastic_reported{name="step",rank="0"} 7.0',
        'elastic_reported{name="loss",rank="1"} NaN',
    }
    for n in range(10 * NAMES):
        figures.report(report(0, **{f"{n}": 1.0}))
    assert len(figures.reported[0]) == NAMES
    note(figures, TimePassed(), [published(2, A)])
    assert list(figures.reported) == [0]


def test_metrics_are_served_on_loopback_until_the_end():
    figures = JobMetrics(TimeSpent(JobView()))
    metrics = MetricsServer("127.0.0.1", 0, figures, threading.Lock())
    figures.view.note(TimePassed(), starts(A), 1.0)
    url = f"http://127.0.0.1:{metrics.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert b'elastic_workers{stage="starting"} 1.0' in answer.read()
    with raises(Invalid, metrics.port):
        server("127.0.0.1", metrics.port)
    metrics.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", metrics.port), timeout=10)


def scrape(metrics: MetricsServer, host: str) -> tuple[int, bytes]:
    """Return the answer to an HTTP/1.0 request with this Host header; empty: without one."""
    call = http.client.HTTPConnection("127.0.0.1", metrics.port, timeout=30)
    with contextlib.closing(call):
        call.putrequest("GET", "/metrics", skip_host=True)
        if host:
            call.putheader("Host", host)
        call.endheaders()
        answer = call.getresponse()
        return answer.status, answer.read()


def test_foreign_host_name_is_rejected_on_loopback():
    with contextlib.closing(server("127.0.0.1")) as metrics:
        own = socket.gethostname()
        for host in ("", "localhost:9100", "127.0.0.1:9100", "[::1]:9100", "10.0.0.7", own):
            assert scrape(metrics, host)[0] == 200, host
        for host in ("rebound.example:9100", "localhost.example", f"{own}.example:80"):
            status, body = scrape(metrics, host)
            assert status == 403 and b"elastic_workers" not in body
            recorded("messages", body)


def test_any_host_name_is_accepted_beyond_loopback():
    with contextlib.closing(server("0.0.0.0")) as metrics:
        assert scrape(metrics, "driver.training.svc:9100")[0] == 200


def test_recoveries_are_counted_by_phase():
    figures = training(A, B)
    phases = {"gathered": 20.0, "formed": 300.0}
    report = ReportRecovery(2, "recovery", as_sentence("lost"), 2, 320.0, phases, 0)
    note(figures, TimePassed(), [report])
    scraped = lines(figures)
    name = "elastic_recovery_phase_seconds"
    assert f'{name}_bucket{{kind="recovery",le="0.025",phase="gathered"}} 1.0' in scraped
    assert f'{name}_bucket{{kind="recovery",le="0.25",phase="formed"}} 0.0' in scraped
    assert f'{name}_sum{{kind="recovery",phase="formed"}} 0.3' in scraped


def test_goodput_and_age_of_the_newest_durable_commit_are_shown():
    figures = JobMetrics(TimeSpent(JobView()))
    [start] = starts(A)
    note(figures, TimePassed(), [start], 100.0)
    note(figures, WorkerSpent(A, 1, Times(training=6.0, joining=2.0), "idle"), [], 108.0)
    note(figures, CheckpointMade(Commit(1, 7)), [], 110.0)
    values = {m.name: m.samples[0].value for m in families(figures, 117.0) if m.samples}
    assert values["elastic_last_durable_commit_age_seconds"] == 7.0
    assert values["elastic_goodput_ratio"] == pytest.approx(0.6)  # idle for two seconds since
    [spent] = [m for m in families(figures) if m.name == "elastic_job_spent_seconds"]
    assert sum(sample.value for sample in spent.samples) == 10.0


def test_names_and_units_follow_the_conventions_of_prometheus():
    figures = training(A, B)
    note(figures, CheckpointMade(Commit(0, 0)))
    for family in families(figures):
        assert re.fullmatch(r"elastic(_[a-z]+)+", family.name) and family.documentation[-1] == "."
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample
        assert not re.search(r"_(ms|millis|minutes|mb|kb|percent)(_|$)", family.name)
