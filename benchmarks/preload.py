"""How long does a worker take that replaces a lost one, with and without a prepared process?

From its start to its being ready to join. Two jobs run at the same time, of two workers each, and are struck by turns.
"""

from __future__ import annotations

import functools
import random
import signal
import time
from typing import Any

from rich.console import Console

from disturbed import Disturbed, options_of, table_of, write_json

REST_S = 8.0  # after a strike: for a process to be prepared; the other job is struck meanwhile


def came(job: Disturbed, incarnations: int) -> list[float] | None:
    """Milliseconds from start to ready, of all that replace somebody, once there are so many."""
    started: dict[tuple[Any, ...], float] = {}
    took: dict[tuple[Any, ...], float] = {}
    for record in job.records():
        for action in record.get("actions", []):
            if action["type"] == "StartWorker" and action["worker"][2] > 1:
                started[tuple(action["worker"])] = record["at"]
        event = record.get("event") or {}
        if event.get("type") == "WorkerReady" and tuple(event["worker"]) in started:
            who = tuple(event["worker"])
            took.setdefault(who, (record["at"] - started[who]) * 1e3)
    return [*took.values()] if len(took) >= incarnations else None


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--strikes", type=int, default=10)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with Disturbed(2) as plain, Disturbed(2, "--preload", "auto") as prepared:
        jobs = {"started anew": plain, "from a prepared process": prepared}
        for strike in range(options.strikes):
            for job in jobs.values():
                time.sleep(REST_S / 2)
                job.strike(signal.SIGKILL, rng)
                job.wait("a newcomer", functools.partial(came, job, strike + 1), 60)
        rows = {name: came(job, options.strikes) or [] for name, job in jobs.items()}
    title = "from the start of a worker until it is ready to join"
    Console().print(table_of(title, "strikes", rows))
    write_json(options.json, dict(rows))


if __name__ == "__main__":
    main()
