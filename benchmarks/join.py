"""Cost of a joining worker for the others: the longest gap between steps of an old worker during the join.

A worker is killed and its slot's next incarnation joins. The gap is measured from the newcomer's start (its imports
also use the machine's cores) until one second after its first step.
"""

from __future__ import annotations

import random
import signal

import results_output
from faulted_job import Disturbed, longest_gap, options_of, table_of


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--joins", type=int, default=15)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    agreed, whole, steady = [], [], []
    with Disturbed(options.workers, script=options.script) as job:
        for _ in range(options.joins):
            job.strike(signal.SIGKILL, rng)
            recovered = job.steps()
            generation = recovered[-1].generation
            last = job.until(lambda: job.full(200), "the newcomer", 60)
            steps = job.steps()
            newest = last[0].generation
            joined = min(s.at for s in steps if s.generation == newest)
            begin = min(s.at for s in steps if s.generation == generation)
            old = {s.pid for s in steps if s.generation == generation} & {s.pid for s in last}
            before = [[s.at for s in steps if s.pid == p and s.generation < newest] for p in old]
            agreed.append(longest_gap(steps, old, min(map(max, before)), joined + 0.5))
            whole.append(longest_gap(steps, old, begin, joined + 1.0))
            after = [s for s in steps if s.at > joined + 0.5]
            steady.append(longest_gap(after, old, joined + 0.5, after[-1].at) if after else 0.0)
        job.finish()
    title = f"longest gap between an old worker's steps, {options.workers} workers"
    rows = {
        "around the join itself": agreed,
        "from the newcomer's start (its imports included)": whole,
        "afterwards, without a join": steady,
    }
    results_output.console().print(table_of(title, "joins", rows))
    results_output.write_json(
        options.json, {"join_ms": agreed, "whole_ms": whole, "steady_ms": steady}
    )


if __name__ == "__main__":
    main()
