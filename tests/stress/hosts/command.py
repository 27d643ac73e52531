"""`python -m tests.stress hosts`: run fault scenarios on a job on many hosts, and report the results."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import tempfile
import time
from functools import partial
from pathlib import Path

from elastic.chaos.inject.faulty_job import print_line
from elastic.errors import ElasticError, Invalid
from stress.hosts import random_faults, report
from stress.hosts.cluster import HostCluster
from stress.hosts.namespaces import check_possible
from stress.hosts.report import ScenarioOutcome
from stress.hosts.scenarios import LEASE_S, SCENARIOS, Scenario

DESCRIPTION = """\
Create hosts as network namespaces of this machine, with an agent each, an etcd and drivers. Train on them, and kill
hosts, cut and slow down links, and kill etcd, agents and drivers. Passes if training continues in time, no committed
step is lost and all invariants hold. Requires root; the network of this machine is not changed."""

EXAMPLES = """\
examples:
  python -m tests.stress hosts --only link-cut,driver-killed
  python -m tests.stress hosts --seed 7 --rounds 20
  python -m tests.stress hosts --report docs/hosts.md"""

SETTING = f"""\
Each host is a network namespace of one machine, and a virtual switch connects all hosts. Four hosts run an agent and
one worker each. Three more hosts run etcd, the driver and a standby driver. The workers train a small model with a
commit after every step. The lease is {LEASE_S:g} s, the default.

The switch drops packets with nftables. On a slow link, a token bucket at both ends limits the bandwidth. On a link with
high latency, a pair of taps delays every frame."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", metavar="LIST", help=f"scenarios to run: {', '.join(SCENARIOS)}")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="inject faults drawn from this seed instead, several at once",
    )
    add("--rounds", type=int, default=10, metavar="N", help="rounds of drawn faults (default: 10)")
    add("--report", type=Path, metavar="FILE", help="write a page about this run to FILE")


def main(options: argparse.Namespace) -> int:
    """Return 0 if all scenarios passed. Raises Invalid."""
    names = options.only.split(",") if options.only else list(SCENARIOS)
    for name in names:
        if name not in SCENARIOS:
            raise Invalid(f"--only: unknown scenario {name!r}; choose from {', '.join(SCENARIOS)}")
    if options.seed is not None and (options.only or options.report):
        raise Invalid(
            "--seed injects only random faults and writes no page: leave out --only and --report"
        )
    if options.rounds < 1:
        raise Invalid(f"--rounds is {options.rounds}: pass 1 or more")
    if options.report is not None and not options.report.resolve().parent.is_dir():
        raise Invalid(
            f"{options.report}: the folder {options.report.resolve().parent} does not exist"
        )
    check_possible()
    folder = Path(tempfile.mkdtemp(prefix="elastic-hosts-"))
    print_line(f"programs write to {folder}")
    outcomes = []
    with HostCluster(folder) as bench:
        bench.start_etcd()
        if options.seed is not None:
            game = partial(random_faults.play, seed=options.seed, rounds=options.rounds)
            outcomes.append(play(bench, f"seed {options.seed}", game))
        else:
            for name in names:
                print_line(f"{name}: {SCENARIOS[name].__doc__}")
                outcomes.append(play(bench, name, SCENARIOS[name]))
    print("\n".join(report.table(outcomes)))
    if options.report is not None:
        words = ["--only", options.only] if options.only else []
        words += ["--report", str(options.report)]
        options.report.write_text(
            report.page(
                outcomes,
                command=f"python -m tests.stress hosts {shlex.join(words)}",
                date=time.strftime("%Y-%m-%d"),
                machine=f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
                setting=SETTING,
            )
        )
    passed = all(outcome.passed for outcome in outcomes)
    print(f"{'PASSED' if passed else 'FAILED'}; everything is in {folder}")
    return 0 if passed else 1


def play(bench: HostCluster, name: str, scenario: Scenario) -> ScenarioOutcome:
    """Run one scenario and log the result. An error in it becomes part of its outcome."""
    began = time.monotonic()
    try:
        outcome = scenario(bench)
    except (AssertionError, ElasticError) as error:
        outcome = ScenarioOutcome(name, failed=str(error))
    for trouble in outcome.troubles:
        print_line(f"{name}: {trouble}")
    verdict = "passed" if outcome.passed else "FAILED"
    print_line(f"{name}: {verdict} after {time.monotonic() - began:.1f} s")
    return outcome
