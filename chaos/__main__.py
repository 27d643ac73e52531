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
            "inject faults into the workers of a job, and report the outcome",
        ),
        "check": (
            "elastic.chaos.invariants.check",
            "check the journal of a job for lost commits and other violated invariants",
        ),
        "replay": (
            "elastic.chaos.invariants.replay",
            "replay a journal, and compare the decisions with the recorded ones",
        ),
        "exact": (
            "elastic.chaos.exact.command",
            "run a job of elastic.Shards with and without faults, and compare every commit",
        ),
        "simulate": (
            "elastic.chaos.simulator.command",
            "simulate jobs under random faults on a virtual clock",
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
