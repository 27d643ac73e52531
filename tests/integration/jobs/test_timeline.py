"""The timeline of a real job: complete at any moment, with all ranks, through a kill and a join."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harness.history import SCRIPTS
from harness.job import Job

SCRIPT = SCRIPTS / "timeline_training.py"
PHASES = {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER"}
WRITTEN_S = 5.0
Json = dict[str, Any]


def _read(path: Path) -> list[Json]:
    """A write becomes visible page by page: a read in the middle is repeated. Unchanged text must be complete.

    On a busy machine, the writer may be paused in the middle of a write, so it has WRITTEN_S seconds.
    """
    while True:
        text = path.read_text()
        try:
            events: list[Json] = json.loads(text)
            return events
        except json.JSONDecodeError:
            until = time.monotonic() + WRITTEN_S
            while path.read_text() == text:
                if time.monotonic() > until:
                    raise


class Shown:
    """Return a viewer's display: events by process and row, both by their last names."""

    def __init__(self, path: Path) -> None:
        events = _read(path)
        processes: dict[int, str] = {}
        rows: dict[int, str] = {}
        for event in events:
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                rows[event["tid"]] = event["args"]["name"]
        self.events: dict[str, dict[str, list[Json]]] = defaultdict(lambda: defaultdict(list))
        for event in events:
            if event["ph"] != "M":
                self.events[processes[event["pid"]]][rows[event["tid"]]].append(event)

    def names(self, process: str, row: str) -> set[str]:
        return {event["name"] for event in self.events[process][row]}

    def rank(self, prefix: str) -> str:
        [process] = [name for name in self.events if name.startswith(prefix)]
        return process


@pytest.mark.forked
def test_timeline_of_all_ranks_is_valid_during_a_kill_and_a_join(job):
    """It is read repeatedly while the job runs, and each time it is valid."""
    training: Job = job(
        "-np 3 --min-np 2 --blacklist-cooldown-range 0.1 1 --timeline-filename t.json",
        ["python", SCRIPT],
    )
    path = training.folder / "t.json"
    training.until(path.exists, "a timeline")
    first = [f"rank {rank} (localhost:{rank}#1)" for rank in range(3)]
    training.until(
        lambda: all(Shown(path).names(name, "allreduce.stop") >= PHASES for name in first),
        "phases of all ranks",
    )
    killed = f"localhost:{training.worlds()[-1]['members'][2]['worker'][1]}#1"
    training.kill(2)
    training.until(
        lambda: len(training.actions("ReportRecovery")) >= 3, "a recovery and a join", 60
    )
    training.until(
        lambda: len(Shown(path).events["driver"]["recoveries"]) >= 3, "their spans in the timeline"
    )
    (training.folder / "stop").touch()
    training.succeed()
    assert training.output.count("second: True True") == 3

    shown = Shown(path)
    driver = shown.events["driver"]
    generations = [event["name"] for event in driver["generations"] if event["ph"] == "B"]
    assert "generation 3: 2 workers" in generations and "generation 4: 3 workers" in generations
    assert "recovery: generation 3" in {event["name"] for event in driver["recoveries"]}
    workers = shown.names("driver", "workers")
    newcomer = killed.replace("#1", "#2")
    assert {f"exit {killed}", f"without {killed}", f"join {newcomer}"} <= workers

    # The killed one and its successor are two processes; both tell of their steps.
    for process in (f"rank 2 ({killed})", f"rank 2 ({newcomer})"):
        assert "ALLREDUCE" in shown.names(process, "allreduce.stop"), shown.events[process].keys()
    survivor = shown.events[shown.rank("rank 0 ")]
    assert {"raised", "restored", "waited", "synced"} <= {e["name"] for e in survivor["recovery"]}
    [gradients] = [row for row in survivor if row.startswith("gradients 0: ")]
    assert {"ALLREDUCE", "WAIT"} <= {event["name"] for event in survivor[gradients]}
    # All on one clock: what the survivor did in generation 3 lies in the driver's generation 3.
    began, ended = (e["ts"] for e in driver["generations"] if e["name"].startswith("generation 3"))
    [synced] = [
        e for e in survivor["recovery"] if e["name"] == "synced" and began < e["ts"] < ended
    ][:1]
    assert synced["ts"] + synced["dur"] < ended
