"""Share of the time that a job trains while machines join and leave, by a trace or at random from a seed.

A trace has lines ``milliseconds,add|remove,node``. It is compressed, and its nodes are scaled to slots of this machine:
with 32 live nodes and --slots 8, 4 nodes are a slot. When a node is removed, its worker is killed with SIGKILL, and its
slot is removed from the list of hosts; with --ahead the slot is removed first, like a machine that announces its end,
and remaining workers are killed after that many seconds.

Goodput is the time in which steps were made for the first time, divided by the time with at least one slot: a gap
between two steps counts up to five times the usual one, the rest is lost. Times without any slot are reported
separately: the time from the return of a slot to the next step, from the newest checkpoint. Slots filled is the share
of the time of all slots in which they had a worker of the world: the cost of joining.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import results_output
from faulted_job import Disturbed, options_of

USUAL = 5.0  # factor of the median gap between two steps that still counts as training
LEAST_S = 0.05  # a gap below this is no loss, however short the steps are


@dataclass(frozen=True)
class Moment:
    """Number of slots from ``at`` on, in seconds."""

    at: float
    slots: int


def of_trace(lines: Iterable[str], compress: float, slots: int) -> list[Moment]:
    """Convert a trace to numbers of slots. The largest number of nodes is all slots; one node is one slot."""
    alive: set[str] = set()
    counts: list[tuple[float, int]] = []
    for ms, what, node in csv.reader(lines):
        (alive.add if what == "add" else alive.discard)(node)
        counts.append((float(ms) / 1e3 / compress, len(alive)))
    most = max(count for _, count in counts)
    return changes((at, -(-count * slots // most)) for at, count in counts)


def drawn(seed: int, seconds: float, slots: int, all_gone: int) -> list[Moment]:
    """Draw random changes of one or two slots; ``all_gone`` times all slots go, and return after 2 to 6 seconds."""
    rng = random.Random(seed)
    gone = sorted(rng.uniform(0.15, 0.8) * seconds for _ in range(all_gone))
    found, at, count = [(0.0, slots)], 0.0, slots
    while (next_at := at + rng.expovariate(1 / 4.0)) < seconds or gone:
        if gone and gone[0] <= next_at:
            at = max(at, gone.pop(0))
            found += [(at, 0), (at + rng.uniform(2, 6), count)]
            at = found[-1][0] + 10.0
            continue
        at = next_at
        count = min(slots, max(1, count + rng.choice((-2, -1, 1, 2))))
        found.append((at, count))
    return changes(found)


def changes(counts: Iterable[tuple[float, int]]) -> list[Moment]:
    """Return the last count of each moment if it differs from the previous one."""
    found: list[Moment] = []
    for at, group in itertools.groupby(counts, key=lambda each: each[0]):
        count = list(group)[-1][1]
        if not found or count != found[-1].slots:
            found.append(Moment(at, count))
    return found


def first_times(steps: Iterable[tuple[float, int]]) -> list[float]:
    """Return when each step was made for the first time, from (time, number) of all, in the order of time."""
    newest, found = 0, []
    for at, number in steps:
        if number > newest:
            newest = number
            found.append(at)
    return found


def trained_s(times: Sequence[float], begin: float, end: float) -> float:
    """Return the seconds of [begin, end] in which steps followed each other as usual."""
    gaps = [b - a for a, b in itertools.pairwise(times)]
    most = max(LEAST_S, USUAL * statistics.median(gaps))
    return sum(
        min(b, end) - max(a, begin) if b - a <= most else most * (a >= begin and b <= end)
        for a, b in itertools.pairwise(times)
        if b > begin and a < end
    )


def filled(slots: Sequence[tuple[float, int]], worlds: Sequence[tuple[float, int]]) -> float:
    """Return the share of the time of all slots in which they had a worker of the world.

    Both arguments are (begin, number), up to the last time of ``slots``.
    """
    there = used = 0.0
    times = sorted({at for at, _ in slots} | {at for at, _ in worlds if at < slots[-1][0]})
    for begin, end in itertools.pairwise([at for at in times if at >= slots[0][0]]):
        have, members = (
            next((n for at, n in reversed(each) if at <= begin), 0) for each in (slots, worlds)
        )
        there += have * (end - begin)
        used += min(have, members) * (end - begin)
    return used / there


class Machines:
    """The slots of a job under test, and the processes in them."""

    def __init__(self, job: Disturbed, hosts: Path) -> None:
        self.job = job
        self.hosts = hosts
        self.slots = 0

    def have(self, slots: int) -> None:
        new = self.hosts.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n" if slots else "")
        new.rename(self.hosts)
        self.slots = slots

    def processes(self, first: int) -> list[int]:
        """Return the process ids of all live workers that were started in a slot from ``first`` on."""
        started = [
            (event["worker"][1], event["pid"])
            for record in self.job.records()
            if (event := record.get("event") or {}).get("type") == "WorkerConnected"
        ]
        return [pid for slot, pid in started if slot >= first and psutil.pid_exists(pid)]

    def kill(self, first: int) -> None:
        for pid in self.processes(first):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def play(machines: Machines, moments: Sequence[Moment], ahead_s: float) -> list[tuple[float, int]]:
    """Replay the trace. Returns (time by CLOCK_MONOTONIC, number of slots) of each change."""
    begin = time.monotonic()
    played: list[tuple[float, int]] = []
    for moment in moments:
        while (left := begin + moment.at - time.monotonic()) > 0:
            if played and not machines.slots:
                # an empty list stops no worker, but in this benchmark no machine exists
                machines.kill(0)
            time.sleep(min(left, 0.2))
        fewer = moment.slots < machines.slots
        if fewer and not ahead_s:
            machines.kill(moment.slots)
        machines.have(moment.slots)
        if fewer and ahead_s:
            time.sleep(ahead_s)
            machines.kill(moment.slots)
        played.append((time.monotonic(), moment.slots))
    return played


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--trace", type=Path, help="a file; without it one is drawn from --seed")
    parser.add_argument("--compress", type=float, default=120.0, help="how much faster than it was")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=180.0, help="of a trace that is drawn")
    parser.add_argument("--all-gone", type=int, default=3, help="moments without a slot, drawn")
    parser.add_argument("--ahead", type=float, default=0.0, help="seconds; 0: no notice")
    parser.add_argument(
        "--standbys", type=int, default=0, help="of the slots, how many are for standbys"
    )
    parser.add_argument("--flags", default="", help="more of elasticrun's flags, as one argument")
    options = parser.parse_args()
    if options.trace:
        moments = of_trace(options.trace.read_text().splitlines(), options.compress, options.slots)
    else:
        moments = drawn(options.seed, options.seconds, options.slots, options.all_gone)
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"elastic-goodput-{os.getpid()}")
    folder.mkdir()
    hosts, script = folder / "hosts", folder / "discover"
    hosts.write_text(f"localhost:{options.slots}\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    workers = options.slots - options.standbys
    flags = ["--host-discovery-script", str(script), "--max-np", str(workers)]
    flags += ["--standbys", str(options.standbys)] if options.standbys else []
    flags += ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "1s"]
    flags += ["--blacklist-cooldown-range", "0.1", "0.5", *options.flags.split()]
    with Disturbed(workers, *flags) as job:
        machines = Machines(job, hosts)
        machines.have(options.slots)
        job.until(lambda: job.full(20), "a full world", 180)
        played = play(machines, moments, options.ahead)
        time.sleep(2.0)
        over = time.monotonic()
        steps = [(step.at, step.step) for step in job.steps() if step.at <= over]
        killed = len(job.actions("BreakWorld"))
        worlds = [
            (record["at"], len(action["members"]))
            for record in job.records()
            for action in record.get("actions") or []
            if action["type"] == "PublishWorld"
        ]
        machines.kill(0)
    times = first_times(steps)
    there = trained = 0.0
    back_s: list[float] = []
    for (begin, slots), (end, _) in itertools.pairwise([*played, (over, 0)]):
        if not slots:
            back_s += [at - end for at in times if at > end][:1]
            continue
        after_all_gone = [at for at, n in played if n == 0 and at < begin]
        if after_all_gone and not any(after_all_gone[-1] < at <= begin for at in times):
            # reported separately
            begin = next((at for at in times if at > after_all_gone[-1]), end)
        if begin < end:
            there += end - begin
            trained += trained_s(times, begin, end)
    goodput = trained / there
    table = results_output.table(
        f"{len(moments)} changes in {played[-1][0] - played[0][0]:.0f} s, {options.slots} slots",
        *("worlds broke", "steps", "goodput", "slots filled"),
        *("all gone", "a slot is back -> next step, s"),
    )
    waits = ", ".join(f"{each:.1f}" for each in back_s)
    share = filled([*played, (over, 0)], worlds)
    figures = (str(killed), str(len(times)), f"{goodput:.4f}", f"{share:.3f}")
    table.add_row(*figures, str(len(back_s)), waits)
    results_output.console().print(table)
    found = {"goodput": goodput, "filled": share, "back_s": back_s, "worlds_broke": killed}
    results_output.write_json(options.json, found)


if __name__ == "__main__":
    main()
