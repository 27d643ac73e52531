"""Benefit of a standby, its cost while it waits, and the start time of the next standby.

A job of two workers and one standby, without and with a preloaded process. A random worker is killed repeatedly. The
world is full again when every member of a world of two has the state and is in its training function; the next step is
reported separately, together with the usual one. Between the kills the standby is alternately stopped and continued for
a second: the ratio of the medians of a member's steps is the cost of its presence.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import signal
import statistics
import time
from typing import Any

import results_output
import tests_on_path  # noqa: F401
from faulted_job import Disturbed, options_of, table_of
from harness.step_lines import Step

WORKERS = 2
TURN_S = 1.0  # shorter than a lease


def stands_by(job: Disturbed) -> int | None:
    """Return the process id of the current standby."""
    members = {tuple(m["worker"]) for w in job.actions("PublishWorld")[-1:] for m in w["members"]}
    exited, pids, waiting = set(), {}, []
    for record in job.records():
        event = record.get("event") or {}
        if event.get("type") == "WorkerConnected":
            pids[tuple(event["worker"])] = event["pid"]
        if event.get("type") == "WorkerExited":
            exited.add(tuple(event["worker"]))
        waiting += [
            tuple(a["worker"]) for a in record.get("actions") or [] if a["type"] == "TellStandby"
        ]
    found = [pids[w] for w in waiting if w not in members and w not in exited]
    return found[-1] if found else None


def full_after(job: Disturbed, generation: int) -> tuple[float, float] | None:
    """Return two times of the first full world after this one.

    These are the time when the last member was in its training function, and when the last one had made its first step.
    """
    made: dict[tuple[int, int], float] = {}
    for step in job.steps():
        if step.generation > generation and step.size == WORKERS:
            made.setdefault((step.generation, step.rank), step.at)
    entered = {(each.generation, each.rank): each.at for each in job.steps("entries")}
    for number in sorted({number for number, _ in made}):
        who = [key for key in made if key[0] == number]
        if len(who) == WORKERS:
            return max(entered[key] for key in who), max(made[key] for key in who)
    return None


def spent(job: Disturbed, at: float) -> dict[str, float]:
    """Return the milliseconds of the recovery from a kill at ``at``.

    They are the time until the driver noticed, and each phase of its slowest worker; the last phase, until its first
    collective, contains most of a step.
    """
    records = [r for r in job.records() if r.get("at", 0.0) >= at]
    kinds = [(r["at"], a) for r in records for a in r.get("actions") or []]
    noticed = next(when for when, a in kinds if a["type"] == "BreakWorld")
    report = next(a for _, a in kinds if a["type"] == "ReportRecovery")
    return {"noticed": (noticed - at) * 1e3, **report["phases_ms"]}


def turns(job: Disturbed, standby: int, number: int) -> list[tuple[float, float, bool]]:
    """Return begin and end of each turn, and whether the standby was stopped."""
    found = []
    for _ in range(number):
        for stopped in (True, False):
            os.kill(standby, signal.SIGSTOP if stopped else signal.SIGCONT)
            begin = time.monotonic()
            time.sleep(TURN_S)
            found.append((begin, time.monotonic(), stopped))
    return found


def intervals(steps: list[Step], begin: float, end: float) -> list[float]:
    """Return the milliseconds between the steps of rank 0."""
    times = [s.at for s in steps if s.rank == 0 and begin <= s.at <= end]
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


def started(job: Disturbed) -> list[float]:
    """Return the milliseconds from start until ready to join, of each worker that replaced a lost one."""
    began: dict[tuple[Any, ...], float] = {}
    took: dict[tuple[Any, ...], float] = {}
    for record in job.records():
        for action in record.get("actions") or []:
            if action["type"] == "StartWorker" and action["worker"][2] > 1:
                began[tuple(action["worker"])] = record["at"]
        event = record.get("event") or {}
        if event.get("type") == "WorkerReady" and tuple(event["worker"]) in began:
            who = tuple(event["worker"])
            took.setdefault(who, (record["at"] - began[who]) * 1e3)
    return [*took.values()]


def measured(options: argparse.Namespace, preload: str) -> dict[str, Any]:
    """Measure one job: milliseconds, and the ratio of a step with a waiting standby to one with a stopped standby."""
    rng = random.Random(options.seed)
    lasted, stepped, watched = [], [], []
    parts: dict[str, list[float]] = {}
    flags = ["--max-np", str(WORKERS), "--standbys", "1", "--blacklist-cooldown-range", "1", "2"]
    flags += ["--slot-attempts", "1000", "--preload", preload]
    with Disturbed(
        WORKERS, *flags, width=options.width, example="gpt" if options.gpt else ""
    ) as job:
        for _ in range(options.strikes):
            standby = job.until(functools.partial(stands_by, job), "a standby", 90)
            watched += turns(job, standby, options.turns)
            last = job.until(lambda: job.full(20), "a full world", 60)
            victim = rng.choice(last)
            at = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            full = functools.partial(full_after, job, victim.generation)
            full_at, stepped_at = job.until(full, "a full world", 60)
            lasted.append((full_at - at) * 1e3)
            stepped.append((stepped_at - at) * 1e3)
            for part, ms in spent(job, at).items():
                parts.setdefault(part, []).append(ms)
        job.until(lambda: len(started(job)) == options.strikes, "the last replacement", 90)
        steps, joining = job.steps(), started(job)
    beside = [
        i for begin, end, stopped in watched if not stopped for i in intervals(steps, begin, end)
    ]
    alone = [i for begin, end, stopped in watched if stopped for i in intervals(steps, begin, end)]
    usual = intervals(steps, steps[0].at, steps[-1].at)
    rows = {
        "from the kill until a full world trains": lasted,
        "until it has made a step": stepped,
        "a usual step": [statistics.median(usual)],
        **parts,
        "from the start of the next worker until it is ready": joining,
    }
    console = results_output.console()
    title = f"{WORKERS} workers and one standby, --preload {preload}"
    console.print(table_of(title, "strikes", rows))
    ratio = statistics.median(beside) / statistics.median(alone)
    console.print(
        f"median step time: {statistics.median(beside):.2f} ms while the standby waits,"
        f" {statistics.median(alone):.2f} ms while it is stopped; ratio {ratio:.3f} ({len(beside)} and"
        f" {len(alone)} steps)"
    )
    return {
        "full_ms": lasted,
        "stepped_ms": stepped,
        "parts_ms": parts,
        "joining_ms": joining,
        "step_ratio": ratio,
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--strikes", type=int, default=10)
    parser.add_argument("--turns", type=int, default=10, help="of both kinds before each strike")
    parser.add_argument("--width", type=int, default=512, help="of the layers of an MLP")
    parser.add_argument("--gpt", action="store_true", help="examples/gpt.py instead of an MLP")
    options = parser.parse_args()
    found = {preload: measured(options, preload) for preload in ("off", "auto")}
    medians = {name: statistics.median(each["joining_ms"]) for name, each in found.items()}
    results_output.console().print(
        "a worker is ready to join, with preload / without:"
        f" {medians['auto']:.0f} / {medians['off']:.0f} ms = {medians['auto'] / medians['off']:.3f}"
    )
    results_output.write_json(options.json, found)


if __name__ == "__main__":
    main()
