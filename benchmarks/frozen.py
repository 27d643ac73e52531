"""How long does a frozen worker cost? SIGSTOP of a random worker -> the slowest survivor's next step in the new world,
at default settings.

A stopped worker closes nothing, so that no collective fails by itself: what is measured is the detection (its lease,
2 s) and the recovery after it. Each fenced worker is replaced before the next is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time

from rich.console import Console
from rich.table import Table

from disturbed import Disturbed, percentile


def stop_one(job: Disturbed, workers: int, rng: random.Random) -> tuple[float, float, int]:
    """Returns milliseconds until the fence and until the slowest survivor's next step, and the victim's rank."""
    last = job.wait("a full world", lambda: job.full(workers, 20), 60)
    victim = rng.choice(last)
    survivors = {s.pid for s in last} - {victim.pid}
    fences = len(job.actions("KillWorker"))
    time.sleep(rng.uniform(0.0, 0.25))  # anywhere between two looks at the processes
    stopped_at = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)

    def resumed() -> dict[int, float] | None:
        first: dict[int, float] = {}
        for step in job._recent():
            if step.generation > victim.generation and step.pid in survivors:
                first[step.pid] = min(step.at, first.get(step.pid, step.at))
        return first if first.keys() == survivors else None

    first = job.wait("the survivors' next step", resumed, 60)
    fenced_at = [
        record["at"]
        for record in job.records()
        for action in record.get("actions", [])
        if action["type"] == "KillWorker"
    ][fences]
    # The journal's clock is the loop's, which is CLOCK_MONOTONIC too.
    return (fenced_at - stopped_at) * 1e3, (max(first.values()) - stopped_at) * 1e3, victim.rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    rng = random.Random(options.seed)

    fenced, resumed, ranks = [], [], []
    with Disturbed(options.workers) as job:
        for _ in range(options.trials):
            fenced_ms, resumed_ms, rank = stop_one(job, options.workers, rng)
            fenced.append(fenced_ms)
            resumed.append(resumed_ms)
            ranks.append(rank)
        job.wait("a full world", lambda: job.full(options.workers, 20), 60)
        (job.directory / "stop").touch()
        code = job.driver.wait(60)
        reasons = {kill["reason"] for kill in job.actions("KillWorker")}

    table = Table(title=f"SIGSTOP of one of {options.workers} workers, default settings")
    for column in ("", "trials", "p50 ms", "p90 ms", "max ms"):
        table.add_column(column, justify="left" if not column else "right")
    after = [all_ms - fence_ms for fence_ms, all_ms in zip(fenced, resumed, strict=True)]
    for name, values in (
        ("until the fence", fenced),
        ("from there to the slowest survivor's next step", after),
        ("together", resumed),
    ):
        table.add_row(
            name,
            str(len(values)),
            f"{statistics.median(values):.0f}",
            f"{percentile(values, 0.9):.0f}",
            f"{max(values):.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"victims by rank {sorted(ranks)}; exit code {code}; reasons: {sorted(reasons)}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"fenced_ms": fenced, "resumed_ms": resumed, "ranks": ranks}, file)


if __name__ == "__main__":
    main()
