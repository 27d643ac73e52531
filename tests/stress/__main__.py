"""`python -m tests.stress COMMAND`: stress tests of hvd-elastic, for minutes to hours. README.md describes them."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from elastic.chaos.command_line import CommandLine, heed_signals  # noqa: E402

COMMAND_LINE = CommandLine(
    "python -m tests.stress",
    "Stress tests of hvd-elastic itself. To inject faults into your own job: python -m elastic.chaos run.",
    {
        "matrix": (
            "stress.fault_matrix.command",
            "inject every fault in every phase, on real processes",
        ),
        "fuzz": ("stress.fuzz.command", "fuzz the control-plane protocol"),
        "reductions": (
            "stress.reductions.command",
            "kill and freeze ranks that reduce in shared memory; check every bit",
        ),
        "soak": (
            "stress.soak.command",
            "train for twenty minutes under faults, and look for leaks",
        ),
        "hosts": (
            "stress.hosts.command",
            "kill hosts, links, etcd, agents and drivers of a job on several hosts",
        ),
    },
)
main = COMMAND_LINE.main

if __name__ == "__main__":
    heed_signals()
    sys.exit(main())
