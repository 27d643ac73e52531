"""What does a standby bring, and what does it cost while it waits?

A job of two workers and one standby. A random worker is killed, again and again: until the world is full again, every
member has made a step in it. Between the strikes the standby is stopped for a second and let run for a second, by
turns: the ratio of the medians of a member's steps says what its presence costs.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import statistics
import time

from rich.console import Console

from disturbed import Disturbed, Step, options_of, table_of, write_json

WORKERS = 2
TURN_S = 1.0  # shorter than a lease
TURNS = 10  # before each strike


def stands_by(job: Disturbed) -> int | None:
    """The process of the one that does now."""
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


def full_after(job: Disturbed, generation: int) -> float | None:
    """When the last member made its first step in the first full world after this one."""
    first: dict[tuple[int, int], float] = {}
    for step in job.steps():
        if step.generation > generation and step.size == WORKERS:
            first.setdefault((step.generation, step.rank), step.at)
    for number in sorted({number for number, _ in first}):
        came = [at for (of, _), at in first.items() if of == number]
        if len(came) == WORKERS:
            return max(came)
    return None


def spent(job: Disturbed, at: float, full_at: float) -> dict[str, float]:
    """Milliseconds of the recovery from a kill at ``at``: until the driver knew, each phase of its slowest worker, and
    from the first collective of the slowest until all had made a step.
    """
    records = [r for r in job.records() if r.get("at", 0.0) >= at]
    kinds = [(r["at"], a) for r in records for a in r.get("actions") or []]
    noticed = next(when for when, a in kinds if a["type"] == "BreakWorld")
    resumed, report = next((when, a) for when, a in kinds if a["type"] == "ReportRecovery")
    last = {"until all have made a step": (full_at - resumed) * 1e3}
    return {"noticed": (noticed - at) * 1e3, **report["phases_ms"], **last}


def turns(job: Disturbed, standby: int) -> list[tuple[float, float, bool]]:
    """Begin and end of each turn, and whether the standby was stopped."""
    found = []
    for _ in range(TURNS):
        for stopped in (True, False):
            os.kill(standby, signal.SIGSTOP if stopped else signal.SIGCONT)
            begin = time.monotonic()
            time.sleep(TURN_S)
            found.append((begin, time.monotonic(), stopped))
    return found


def intervals(steps: list[Step], begin: float, end: float) -> list[float]:
    """Milliseconds between the steps of rank 0."""
    times = [s.at for s in steps if s.rank == 0 and begin <= s.at <= end]
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--strikes", type=int, default=10)
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    lasted, watched = [], []
    parts: dict[str, list[float]] = {}
    flags = ("--max-np", str(WORKERS), "--standbys", "1", "--blacklist-cooldown-range", "1", "2")
    with Disturbed(WORKERS, *flags, "--slot-attempts", "1000", width=options.width) as job:
        for _ in range(options.strikes):
            standby = job.wait("a standby", functools.partial(stands_by, job), 90)
            watched += turns(job, standby)
            last = job.wait("a full world", lambda: job.full(20), 60)
            victim = rng.choice(last)
            at = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            full = functools.partial(full_after, job, victim.generation)
            full_at = job.wait("a full world", full, 60)
            lasted.append((full_at - at) * 1e3)
            for part, ms in spent(job, at, full_at).items():
                parts.setdefault(part, []).append(ms)
        steps = job.steps()
    beside = [
        i for begin, end, stopped in watched if not stopped for i in intervals(steps, begin, end)
    ]
    alone = [i for begin, end, stopped in watched if stopped for i in intervals(steps, begin, end)]
    rows = {"from the kill until a full world has made a step": lasted, **parts}
    console = Console()
    console.print(table_of(f"{WORKERS} workers and one standby", "strikes", rows))
    ratio = statistics.median(beside) / statistics.median(alone)
    console.print(
        f"a step with the standby waiting: {statistics.median(beside):.2f} ms, with it stopped:"
        f" {statistics.median(alone):.2f} ms; ratio {ratio:.3f} ({len(beside)} and {len(alone)} steps)"
    )
    write_json(options.json, {"full_ms": lasted, "parts_ms": parts, "step_ratio": ratio})


if __name__ == "__main__":
    main()
