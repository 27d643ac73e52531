"""How long does a frozen worker cost? SIGSTOP of a random worker -> the slowest survivor's next step in the new world,
at default settings.

A stopped worker closes nothing, so that no collective fails by itself: what is measured is the detection (its lease,
2 s) and the recovery after it. Each fenced worker is replaced before the next is stopped.
"""

from __future__ import annotations

import random
import signal

import msgspec
from rich.console import Console

from disturbed import Disturbed, options_of, table_of, write_json
from elastic.driver.reasons import Reason

LOOKS_S = 0.25  # between two looks at the processes: a worker is stopped anywhere between them


def fences(job: Disturbed) -> list[float]:
    """When each worker was ordered to be killed."""
    return [
        record["at"]
        for record in job.records()
        for action in record.get("actions", [])
        if action["type"] == "KillWorker"
    ]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    rng = random.Random(options.seed)

    fenced, resumed, ranks = [], [], []
    with Disturbed(options.workers) as job:
        for _ in range(options.trials):
            before = len(fences(job))
            strike = job.strike(signal.SIGSTOP, rng, within_s=LOOKS_S)
            fenced.append((fences(job)[before] - strike.at) * 1e3)
            resumed.append(strike.lasted_ms)
            ranks.append(strike.victim.rank)
        code = job.finish()
        kills = job.actions("KillWorker")
        reasons = {str(msgspec.convert(kill["reason"], Reason)) for kill in kills}

    after = [all_ms - fence_ms for fence_ms, all_ms in zip(fenced, resumed, strict=True)]
    title = f"SIGSTOP of one of {options.workers} workers, default settings"
    rows = {
        "until the fence": fenced,
        "from there to the slowest survivor's next step": after,
        "together": resumed,
    }
    console = Console()
    console.print(table_of(title, "trials", rows))
    console.print(f"victims by rank {sorted(ranks)}; exit code {code}; reasons: {sorted(reasons)}")
    write_json(options.json, {"fenced_ms": fenced, "resumed_ms": resumed, "ranks": ranks})


if __name__ == "__main__":
    main()
