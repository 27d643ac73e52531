"""`python -m elastic.chaos COMMAND`: inject faults into users' jobs, and check their journals."""

from __future__ import annotations

import sys

from elastic.chaos.command_line import CommandLine, heed_signals

COMMAND_LINE = CommandLine(
    "python -m elastic.chaos",
    "Inject faults into jobs, and report their outcomes.",
    {
        "run": (
            "elastic.chaos.inject.command",
            "kill, freeze, slow down and disconnect workers of your own job, with a report at the end",
        ),
        "check": (
            "elastic.chaos.invariants.check",
            "check the journal of a job for lost commits and other broken invariants",
        ),
        "replay": ("elastic.chaos.invariants.replay", "replay a journal and compare the decisions"),
        "exact": (
            "elastic.chaos.exact.command",
            "run a sharded job undisturbed and under faults; compare every commit",
        ),
        "simulate": (
            "elastic.chaos.simulator.command",
            "run thousands of drivers and workers on a virtual clock, under random faults",
        ),
    },
    [
        "python -m elastic.chaos run --mean-time-between-faults 20 -- \\",
        "    elasticrun -np 4 --min-np 1 python train.py",
    ],
)
main = COMMAND_LINE.main

if __name__ == "__main__":
    heed_signals()
    sys.exit(main())
