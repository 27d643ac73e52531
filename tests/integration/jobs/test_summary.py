"""`--summary`: time spent, of a job in which workers are killed; equal to the journal's."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import elastic
from elastic.driver.commandline.offline.explain_cli import as_json
from elastic.driver.commandline.offline.replay_cli import play
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.journal_file import JournalEntries
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.protocol.messages import Worker
from harness import wording
from harness.forking import SPARE_WORKERS
from harness.history import SCRIPTS
from harness.job import Job
from harness.ports import free_port

pytestmark = pytest.mark.forked

TRAINING = ["python", str(SCRIPTS / "spending.py")]
FLAGS = (
    "-np 2 --min-np 1 --max-np 2 --blacklist-cooldown-range 0.1 0.2 --slot-attempts 1000 --summary"
)
PARTS = [
    "total",
    "training",
    "committing",
    "data",
    "storage",
    "recovering",
    "joining",
    "lost",
    "idle",
    "stalled",
]
NAME = r"\S+:\d+#\d+"
Seconds = dict[str, float]


def table(output: str) -> dict[str, dict[str, float]]:
    """The rows of the summary, by worker."""
    rows = re.findall(rf"^elastic \|     ({NAME}|all workers)\s+([\d. ]+)$", output, re.M)
    return {name: dict(zip(PARTS, map(float, cells.split()), strict=True)) for name, cells in rows}


def lifetimes(training: Job) -> dict[str, float]:
    """By the journal: from the start of each worker to its exit, in seconds."""
    began, ended = {}, {}
    for record in training.records():
        event = record.get("event") or {}
        if event.get("type") == "WorkerExited":
            ended[str(Worker(*event["worker"]))] = record["at"]
        for action in record.get("actions") or []:
            if action["type"] == "StartWorker":
                began[str(Worker(*action["worker"]))] = record["at"]
    return {name: ended[name] - began[name] for name in began}


def scraped(training: Job) -> tuple[Seconds, Seconds]:
    """Of the workers by part, of the job by stretch: as Prometheus has it now."""
    at = re.search(wording.METRICS_ARE_AT, training.output)
    assert at is not None
    with urllib.request.urlopen(at[1], timeout=10) as answer:
        told = list(text_string_to_metric_families(answer.read().decode()))
    samples = {
        family.name: {s.labels.get("part", ""): s.value for s in family.samples} for family in told
    }
    return samples["elastic_spent_seconds"], samples["elastic_job_spent_seconds"]


def explained(journal: Path) -> dict[str, Any]:
    """Return the times of `elasticrun explain --json`, and those of a page that replays the job, at its end."""
    with JournalEntries(journal) as entries:
        page = PageModel(TimeSpent(JobView()), name="", command=[], least=1, most=2)
        for entry in entries:
            play(page, entry, entry.at)
        page.patch(entry.at + 100.0)
        found = json.loads(as_json(entries.reading))["findings"]
    [time] = [each["facts"] for each in found if each["what"] == "time"]
    return {"explain": time, "page": page.state.values["goodput"]}


def until_two_train(training: Job) -> None:
    def found() -> bool:
        worlds, resumed = training.worlds(), training.events("WorkerResumed")
        two = bool(worlds) and len(worlds[-1]["members"]) == 2
        return two and worlds[-1]["generation"] in [each["generation"] for each in resumed]

    training.until(found, "a world of two that trains", 120)


@pytest.mark.parametrize(
    "kills", [3, pytest.param(50, marks=[pytest.mark.nightly, pytest.mark.timeout(450)])]
)
def test_summary_parts_add_up_and_match_the_journal(job, tmp_path, monkeypatch, kills):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    env = {"ELASTIC_TEST_FOLDER": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    env[SPARE_WORKERS] = str(kills)  # else most of it would be imports of newcomers
    training = job(f"{FLAGS} --metrics-port {free_port()}", TRAINING, env=env)
    for _ in range(kills):
        until_two_train(training)
        (tmp_path / "die").touch()
        training.until(lambda: len(training.worlds()[-1]["members"]) == 1, "a world of one")
    until_two_train(training)
    shown = elastic.Job().status()["set"]["goodput"]
    workers, stretches = scraped(training)
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0

    # While it runs the page looks once a second, and a scrape at once: they are no further apart, for each worker.
    assert 0 <= sum(stretches.values()) - sum(shown["job"].values()) < 2.5
    assert 0 <= sum(workers.values()) - sum(shown["workers"].values()) < 5.0
    for part, seconds in shown["workers"].items():
        assert workers[part] == pytest.approx(seconds, abs=5.0)
    assert shown["ratio"] == pytest.approx(
        shown["workers"]["training"] / sum(shown["workers"].values())
    )

    rows = table(training.output)
    everybody = rows.pop("all workers")
    lived = lifetimes(training)
    if kills < 30:  # of more, the table has some
        assert rows.keys() == lived.keys()
    for name, row in rows.items():
        assert sum(row[part] for part in PARTS[1:]) == pytest.approx(row["total"], abs=0.05)
        assert row["total"] == pytest.approx(lived[name], rel=0.001, abs=0.02)
    # The table has hundredths, which are more than a thousandth of a short job.
    assert everybody["total"] == pytest.approx(sum(lived.values()), rel=0.001, abs=0.005)
    # At the end all say the same, and it is the wall time: of the job, and of all its workers.
    told = explained(training.journal)
    assert told["page"]["workers"] == pytest.approx(told["explain"]["workers"])
    assert told["page"]["job"] == pytest.approx(told["explain"]["job"])
    assert told["page"]["ratio"] == pytest.approx(told["explain"]["goodput"])
    ats = [record["at"] for record in training.records() if record.get("event")]
    assert sum(told["page"]["job"].values()) == pytest.approx(ats[-1] - ats[0], rel=0.001)
    assert sum(told["page"]["workers"].values()) == pytest.approx(sum(lived.values()), rel=0.001)
    for part in PARTS[1:]:
        assert everybody[part] == pytest.approx(told["explain"]["workers"][part], abs=0.0051)
    assert f"time spent, {told['explain']['job_s']:.1f} s" in training.output
    recovered = [r for r in training.actions("ReportRecovery") if r["kind"] == "recovery"]
    assert len(recovered) == kills
    assert f"({kills} times)" in training.output
    # The survivor of all was there all the time, and has recovered for as long as the journal's reports say.
    first = rows[min(rows)]
    said = sum(report["total_ms"] for report in recovered) / 1e3
    assert 0 < first["recovering"] <= said + 0.05 * kills
    # Three steps of 50 and more are lost each time, and as much by the one that died.
    trained = first["training"] + first["data"]
    assert 0 < first["lost"] < 0.3 * trained
    dead = [row for name, row in rows.items() if name != min(rows) and row["lost"]]
    if kills < 30:
        assert len(dead) == kills
    assert all(row["lost"] < 0.3 * (row["training"] + row["data"]) for row in dead)
    assert first["data"] > 0 and first["training"] > 0
    # What the workers printed of themselves: since init(), and so a part of what the driver counts.
    walls = [float(wall) for wall in re.findall(r"wall ([\d.]+)", training.output)]
    assert len(walls) == 2
    assert max(walls) <= first["total"]


def test_time_after_init_counts_as_training_in_a_job_that_is_not_elastic(job, tmp_path):
    script = tmp_path / "static.py"
    script.write_text("import time, elastic\nelastic.init()\ntime.sleep(0.5)\n")
    training = job("-np 2 --summary", ["python", str(script)])
    assert training.wait(60) == 0
    rows = table(training.output)
    assert len(rows) == 3
    assert all(row["training"] >= 0.5 for row in rows.values())


def test_no_summary_is_printed_without_its_flag(job, tmp_path):
    (tmp_path / "enough").touch()
    flags = FLAGS.replace(" --summary", "")
    training = job(flags, TRAINING, env={"ELASTIC_TEST_FOLDER": str(tmp_path)})
    assert training.wait(60) == 0
    assert "time spent" not in training.output
