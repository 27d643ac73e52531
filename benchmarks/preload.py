"""How long does a worker take that replaces a lost one, with and without a prepared process?

From its start to its being ready to join. One job after the other, of two workers each, of which one trains on.
"""

from __future__ import annotations

import functools
import random
import signal
import time
from typing import Any

import shown
from disturbed import Disturbed, options_of, table_of

REST_S = 10.0  # after a strike: for a process to be prepared


OFTEN = ("--slot-attempts", "1000", "--blacklist-cooldown-range", "1", "2")  # the same slots


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
    parser.add_argument("--gpt", action="store_true", help="examples/gpt.py instead of an MLP")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows = {}
    for name, flags in (("started anew", ()), ("from a prepared process", ("--preload", "auto"))):
        with Disturbed(2, *flags, *OFTEN, example="gpt" if options.gpt else "") as job:
            for strike in range(options.strikes):
                time.sleep(REST_S)
                job.strike(signal.SIGKILL, rng)
                newcomers = functools.partial(came, job, strike + 1)
                rows[name] = job.wait("a newcomer", newcomers, 60)
    title = "from the start of a worker until it is ready to join"
    shown.console().print(table_of(title, "strikes", rows))
    shown.write_json(options.json, rows)


if __name__ == "__main__":
    main()
