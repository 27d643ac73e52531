"""Prometheus metrics: from a job's events to the lines of a scrape."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from elastic.driver.events import (
    CheckpointMade,
    EndJob,
    KillWorker,
    LetGo,
    Member,
    PublishWorld,
    ReportRecovery,
    StartWorker,
    TimePassed,
    WorkerConnected,
    WorkerDigested,
    WorkerExited,
    WorkerPaced,
    WorkerProgressed,
    WorkerReady,
    WorkerReturned,
    WorkerSpent,
)
from elastic.driver.membership.failure_detection.gpu_hangs import Hang, HangFinding, hang_of_one
from elastic.driver.monitoring.metrics import NAMES, JobMetrics, MetricsServer, families
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Commit, Place, Times, Worker
from elastic.protocol.report_values import Report
from harness.golden import raises, recorded

A, B, C = (Worker("localhost", slot) for slot in range(3))
PLACE = Place(0, 3, 0, 3, 0, 1)


def published(*workers: Worker, generation: int = 1) -> PublishWorld:
    members = [Member(worker, PLACE) for worker in workers]
    return PublishWorld(generation, members, Address("h", 1), 0, None, as_sentence("first world"))


def training(*workers: Worker) -> JobMetrics:
    figures = JobMetrics()
    figures.note(
        TimePassed(), [StartWorker(worker, PLACE, as_sentence("first start")) for worker in workers]
    )
    for worker in workers:
        figures.note(WorkerConnected(worker, 7), [])
    figures.note(WorkerReady(workers[0], 0, None, Address("h", 1)), [published(*workers)])
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
    figures.note(WorkerReturned(C, 1), [])
    assert {
        'elastic_workers{stage="training"} 2.0',
        'elastic_workers{stage="returned"} 1.0',
        'elastic_workers{stage="starting"} 0.0',
        "elastic_generation 1.0",
        "elastic_world_size 3.0",
        "elastic_started_workers_total 3.0",
    } <= lines(figures)


def test_frozen_worker_is_killed_and_lost_once():
    figures = training(A, B)
    figures.note(
        TimePassed(), [KillWorker(B, because(ReasonKind.FROZEN, how="stopped by a signal"))]
    )
    assert 'elastic_workers{stage="killed"} 1.0' in lines(figures)
    figures.note(WorkerReady(B, 1, None, Address("h", 1)), [])  # its last message
    assert figures.stages[B] == "killed"
    figures.note(WorkerExited(B, -9), [published(A, generation=2)])
    figures.note(WorkerExited(B, -9), [])
    assert {
        'elastic_fenced_workers_total{reason="frozen"} 1.0',
        'elastic_fenced_workers_total{reason="stuck"} 0.0',
        "elastic_lost_workers_total 1.0",
        "elastic_generation 2.0",
        'elastic_workers{stage="training"} 1.0',
        'elastic_workers{stage="killed"} 0.0',
    } <= lines(figures)


def test_released_worker_is_not_lost():
    figures = training(A, B, C)
    figures.note(
        TimePassed(),
        [
            LetGo(A, as_sentence("its host left")),
            KillWorker(B, as_sentence("the host left the list")),
        ],
    )
    figures.note(WorkerExited(A, 1), [])
    figures.note(WorkerExited(B, -9), [EndJob(0, as_sentence("done"))])
    figures.note(WorkerExited(C, -15), [])
    assert "elastic_lost_workers_total 0.0" in lines(figures)
    assert sum(figures.fenced.values()) == 0


def test_every_kill_has_a_kind():
    figures = training(A)
    for hang in Hang:
        hung = hang_of_one(HangFinding(hang, "gradients", 7, 10.0))
        figures.note(TimePassed(), [KillWorker(A, hung)])
    for why in (
        ReasonKind.IDLE,
        ReasonKind.BUSY,
        ReasonKind.CUT_OFF,
        ReasonKind.OTHER_DIGEST,
        ReasonKind.NO_INIT,
        ReasonKind.JOB_ENDED,
    ):
        figures.note(TimePassed(), [KillWorker(A, because(why))])
    counted = {"frozen": 0, "stuck": 2, "cut off": 1, "digest": 1, "gpu": len(Hang), "late": 1}
    assert figures.fenced == counted


def test_recoveries_are_a_histogram():
    figures = training(A, B)
    for ms in (20.0, 80.0, 40_000.0):
        report = ReportRecovery(2, "recovery", as_sentence("lost b"), 1, ms, {}, 0)
        figures.note(TimePassed(), [report])
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
        figures.note(WorkerPaced(worker, 1, 300, waited_s, 30.0), [])
    assert {
        'elastic_straggler{worker="localhost:2#1"} 1.0',
        'elastic_straggler{worker="localhost:0#1"} 0.0',
        'elastic_waited_seconds_total{worker="localhost:0#1"} 25.0',
        'elastic_reported_seconds_total{worker="localhost:0#1"} 30.0',
        'elastic_collectives_total{worker="localhost:0#1"} 300.0',
    } <= lines(figures)
    figures.note(TimePassed(), [published(A, B, C, generation=2)])
    figures.note(WorkerPaced(A, 1, 300, 1.0, 30.0), [])  # of the previous world
    assert 'elastic_straggler{worker="localhost:2#1"} 0.0' in lines(figures)


def test_exited_workers_leave_no_lines():
    figures = training(A, B)
    figures.note(WorkerPaced(B, 1, 300, 1.0, 30.0), [])
    figures.note(WorkerExited(B, 1), [])
    assert not [line for line in lines(figures) if "localhost:1#1" in line]


def test_newest_commit_is_shown():
    figures = training(A, B)
    assert not [line for line in lines(figures) if "elastic_commit_" in line]
    for worker, commit in ((A, Commit(2, 5)), (B, Commit(2, 4))):
        figures.note(WorkerDigested(worker, 2, commit, 17), [])
    assert {"elastic_commit_number 5.0", "elastic_commit_generation 2.0"} <= lines(figures)


def test_commits_are_counted_within_and_across_worlds():
    figures = training(A, B)
    figures.note(WorkerPaced(A, 1, 300, 1.0, 30.0, 60, Commit(1, 60)), [], 1000.0)
    figures.note(WorkerPaced(B, 1, 300, 1.0, 30.0, 59, Commit(1, 59)), [], 1001.0)
    figures.note(WorkerPaced(A, 1, 300, 1.0, 30.0, 90, Commit(1, 150)), [], 1030.0)
    assert {
        "elastic_commits_total 150.0",
        "elastic_commit_number 150.0",
        "elastic_last_commit_timestamp_seconds 1030.0",
        "elastic_commits_per_second 3.0",
    } <= lines(figures)
    figures.note(TimePassed(), [published(A, B, generation=2)], 1031.0)
    figures.note(WorkerPaced(A, 2, 300, 1.0, 30.0, 10, Commit(2, 10)), [], 1061.0)
    assert {"elastic_commits_total 160.0", "elastic_commit_number 10.0"} <= lines(figures)


def test_steps_and_samples_are_those_of_rank_0_without_script_changes():
    figures = training(A, B)
    for worker, steps, at in ((A, 100, 110.0), (B, 7, 111.0), (A, 150, 115.0)):
        commit = Commit(1, steps // 10)
        spent = WorkerSpent(
            worker, 1, Times(), "training", commit, step=steps, steps=steps, batch=8
        )
        figures.note(spent, [], at)
    assert {
        "elastic_steps_per_second 10.0",
        "elastic_samples_per_second 160.0",
        "elastic_step 150.0",
    } <= lines(figures)


def test_world_and_stalls_of_the_previous_driver_are_shown():
    figures = JobMetrics()
    figures.adopt([(A, 0), (B, 1)], 4)
    figures.note(WorkerProgressed(A, 4, 7, "gradients", 12.0), [], 1000.0)
    assert {
        "elastic_generation 4.0",
        "elastic_world_size 2.0",
        'elastic_stall_seconds{line="",rank="1",worker="localhost:1#1"} 12.0',
        'elastic_workers{stage="training"} 2.0',
    } <= lines(figures)


def test_durable_commits_are_shown():
    figures = training(A, B)
    assert "elastic_durable_commits_total 0.0" in lines(figures)
    figures.note(CheckpointMade(Commit(1, 60)), [], 1030.0)
    figures.note(CheckpointMade(Commit(1, 120)), [], 1090.0)
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
    figures.note(TimePassed(), [published(A, generation=2)])
    assert list(figures.reported) == [0]


def test_metrics_are_served_on_loopback_until_the_end():
    metrics = MetricsServer("127.0.0.1", 0)
    metrics.note(TimePassed(), [StartWorker(A, PLACE, as_sentence("first start"))], 1.0)
    url = f"http://127.0.0.1:{metrics.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert b'elastic_workers{stage="starting"} 1.0' in answer.read()
    with raises(Invalid, metrics.port):
        MetricsServer("127.0.0.1", metrics.port)
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
    with contextlib.closing(MetricsServer("127.0.0.1", 0)) as metrics:
        own = socket.gethostname()
        for host in ("", "localhost:9100", "127.0.0.1:9100", "[::1]:9100", "10.0.0.7", own):
            assert scrape(metrics, host)[0] == 200, host
        for host in ("rebound.example:9100", "localhost.example", f"{own}.example:80"):
            status, body = scrape(metrics, host)
            assert status == 403 and b"elastic_workers" not in body
            recorded("messages", body)


def test_any_host_name_is_accepted_beyond_loopback():
    with contextlib.closing(MetricsServer("0.0.0.0", 0)) as metrics:
        assert scrape(metrics, "driver.training.svc:9100")[0] == 200


def test_recoveries_are_counted_by_phase():
    figures = training(A, B)
    phases = {"gathered": 20.0, "formed": 300.0}
    report = ReportRecovery(2, "recovery", as_sentence("lost"), 2, 320.0, phases, 0)
    figures.note(TimePassed(), [report])
    scraped = lines(figures)
    name = "elastic_recovery_phase_seconds"
    assert f'{name}_bucket{{kind="recovery",le="0.025",phase="gathered"}} 1.0' in scraped
    assert f'{name}_bucket{{kind="recovery",le="0.25",phase="formed"}} 0.0' in scraped
    assert f'{name}_sum{{kind="recovery",phase="formed"}} 0.3' in scraped


def test_goodput_and_age_of_the_newest_durable_commit_are_shown():
    figures = JobMetrics()
    start = StartWorker(A, PLACE, as_sentence("first start"))
    figures.note(TimePassed(), [start], 100.0)
    figures.note(WorkerSpent(A, 1, Times(training=6.0, joining=2.0), "idle"), [], 108.0)
    figures.note(CheckpointMade(Commit(1, 7)), [], 110.0)
    values = {m.name: m.samples[0].value for m in families(figures, 117.0) if m.samples}
    assert values["elastic_last_durable_commit_age_seconds"] == 7.0
    assert values["elastic_goodput_ratio"] == pytest.approx(0.6)  # idle for two seconds since
    [spent] = [m for m in families(figures) if m.name == "elastic_job_spent_seconds"]
    assert sum(sample.value for sample in spent.samples) == 10.0


def test_names_and_units_follow_the_conventions_of_prometheus():
    figures = training(A, B)
    figures.durable, figures.commit = 1, Commit(0, 0)
    for family in families(figures):
        assert re.fullmatch(r"elastic(_[a-z]+)+", family.name) and family.documentation[-1] == "."
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample
        assert not re.search(r"_(ms|millis|minutes|mb|kb|percent)(_|$)", family.name)
