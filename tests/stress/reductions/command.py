"""`python -m tests.stress reductions`: ranks that share memory reduce tensors while others are killed or frozen.

A few processes form one group after another. In some groups a rank is killed or frozen at a random moment; a frozen
rank is killed after the others were asked to abort, as the driver does it. Every result is compared bit by bit with the
expected one. Findings are a wrong result, a missing or late error, a tensor that is written after its drain, and
anything that a process still holds at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from elastic.collectives.backend_selection import MAX_LOCAL_RANKS
from elastic.collectives.shared_memory import native_library
from elastic.errors import Invalid
from stress.reductions.numbers import ELEMENT_BYTES, Numbers
from stress.reductions.plan import RankReport, ReductionFault, ReductionTally, Round, draw, quantile
from stress.reductions.worker import CallOutcome, Cut, Formed, ReductionWorker, Rested, Task
from stress.soak import resources

DESCRIPTION = (
    "Reduce tensors in shared memory while ranks are killed, and check every bit of every result."
)
EXAMPLES = """\
examples:
  python -m tests.stress reductions --count 10000 --seed 7
"""
ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--count", type=int, default=1000, metavar="N", help="groups to form (default: 1000)")
    add("--seed", type=int, default=1, help="seed of the random choices (default: 1)")
    add("--workers", type=int, default=4, metavar="N", help="number of processes (default: 4)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def main(options: argparse.Namespace) -> int:
    if options.count < 1:
        raise Invalid(f"--count is {options.count}: pass 1 or more")
    if not 2 <= options.workers <= MAX_LOCAL_RANKS:
        raise Invalid(f"--workers is {options.workers}: pass 2 to {MAX_LOCAL_RANKS}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise Invalid(f"{options.json}: the folder {options.json.resolve().parent} does not exist")
    if native_library.load() is None:
        raise Invalid(native_library.missing())
    began = time.monotonic()
    # Of the whole machine: other processes may use shared memory, too.
    before, segments = psutil.virtual_memory().shared, resources.segments()
    fire = ReductionRun(options.workers, options.seed)
    try:
        tally = fire.run(options.count)
    finally:
        fire.end()
    for path in sorted(resources.unused_segments() - segments):
        tally.found(f"{path} is left behind")
    content = summary(tally, time.monotonic() - began)
    content["shared memory of this machine, MB"] = [
        round(each / 1e6, 1) for each in (before, psutil.virtual_memory().shared)
    ]
    show(content, tally, options.seed)
    if options.json is not None:
        options.json.write_text(json.dumps(content | {"findings": tally.findings}, indent=1) + "\n")
    return 1 if tally.findings else 0


class ReductionRun:
    """Directs the processes, and injects the faults."""

    def __init__(self, workers: int, seed: int) -> None:
        torch.set_num_threads(1)  # no thread of this process may hold a lock when it forks
        self._pick = random.Random(seed)
        self._numbers = Numbers(seed)
        gc.collect()
        gc.freeze()  # otherwise, each process would scan all objects of torch repeatedly
        self._members = [self._fork() for _ in range(workers)]

    def run(self, count: int) -> ReductionTally:
        """Run all rounds, or those until a Ctrl-C."""
        tally = ReductionTally()
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(1, count + 1):
                drawn = draw(self._pick, len(self._members), ELEMENT_BYTES)
                tally.note(number, drawn, self._try(number, drawn, tally))
        return tally

    def end(self) -> None:
        for member in self._members:
            member.process.kill()
            member.process.join()

    def _fork(self) -> _Member:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=ReductionWorker(there, self._numbers).run, daemon=True)
        process.start()
        there.close()
        member = _Member(process, here)
        member.rested = _expect(member, Rested)
        return member

    def _try(self, number: int, drawn: Round, tally: ReductionTally) -> list[RankReport]:
        members = [self._members[worker] for worker in drawn.ranks]
        address = members[0].rested.listening
        for rank, member in enumerate(members):
            member.pipe.send(Task(number, drawn, rank, address))
        for member in members:
            _expect(member, Formed)
        if drawn.fault is ReductionFault.NONE:
            return [self._rested(member, tally).told for member in members]
        victim = members[drawn.victim]
        time.sleep(drawn.after_s)
        struck_at = time.monotonic()
        assert victim.process.pid is not None
        if drawn.fault is ReductionFault.KILL:
            os.kill(victim.process.pid, signal.SIGKILL)
        others = [member for member in members if member is not victim]
        if drawn.fault is ReductionFault.FREEZE:
            os.kill(victim.process.pid, signal.SIGSTOP)
            time.sleep(drawn.held_s)
            for member in others:
                member.pipe.send(Cut(number))
            time.sleep(drawn.held_s / 3)
            os.kill(victim.process.pid, signal.SIGKILL)
        outcomes = [self._rested(member, tally) for member in others]
        victim.process.join()
        victim.pipe.close()
        victim.process.close()
        self._members[drawn.ranks[drawn.victim]] = self._fork()
        if drawn.fault is ReductionFault.FREEZE:
            struck_at = min((each.cut_at for each in outcomes if each.cut_at), default=struck_at)
        return [
            dataclasses.replace(each.told, late_s=each.failed_at - max(struck_at, each.began_at))
            for each in outcomes
        ]

    def _rested(self, member: _Member, tally: ReductionTally) -> CallOutcome:
        """Wait for a worker's outcome, and check that it holds nothing more than before."""
        outcome: CallOutcome = _expect(member, CallOutcome)
        held = outcome.rested.held
        # The worker's own arena and the arenas of other workers that live or have just been killed.
        limits = {
            "descriptors": member.rested.held["descriptors"] + len(self._members),
            "mappings": len(self._members) + 1,
            "bytes lent": 0,
        }
        for what, limit in limits.items():
            if held[what] > limit:
                tally.found(f"process {member.process.pid} still holds {held[what]} {what}")
        member.rested = Rested(outcome.rested.listening, member.rested.held)
        return outcome


class _Member:
    rested: Rested  # address of the last report, and the resources held at first

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe


def _expect(member: _Member, kind: type[Any]) -> Any:
    if not member.pipe.poll(ANSWER_S):
        raise SystemExit(f"process {member.process.pid} did not answer for {ANSWER_S:g} s")
    try:
        answer = member.pipe.recv()
    except EOFError:
        raise SystemExit(f"process {member.process.pid} exited; see its output") from None
    assert isinstance(answer, kind), answer
    return answer


def summary(tally: ReductionTally, seconds: float) -> dict[str, Any]:
    every = [*tally.errors_s[ReductionFault.KILL], *tally.errors_s[ReductionFault.FREEZE]]
    times = {
        "kill": tally.errors_s[ReductionFault.KILL],
        "abort": tally.errors_s[ReductionFault.FREEZE],
    }
    return {
        "groups": tally.rounds.total(),
        "collectives": {kind.value: count for kind, count in tally.calls.items()},
        "results compared": tally.right + tally.wrong,
        "wrong": tally.wrong,
        "kills": tally.rounds[ReductionFault.KILL],
        "freezes": tally.rounds[ReductionFault.FREEZE],
        "errors": len(every),
        "later than 100 ms": tally.late,
        "in the middle of a chunk": tally.undrained,
        "ms to the error": {
            name: {
                "p50": round(quantile(values, 0.5) * 1e3, 2),
                "p99": round(quantile(values, 0.99) * 1e3, 2),
                "worst": round(max(values, default=0.0) * 1e3, 2),
            }
            for name, values in times.items()
        },
        "seconds": round(seconds, 1),
    }


def show(content: dict[str, Any], tally: ReductionTally, seed: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, value in content.items():
        shown = value
        if isinstance(value, dict):
            shown = "; ".join(f"{key} {each}" for key, each in value.items()).replace("'", "")
        console.print(f"{name:34} {shown}", markup=False, highlight=False)
    for finding in tally.findings:
        console.print(f"FOUND {finding}", markup=False, highlight=False)
    console.print(f"seed {seed}: {len(tally.findings) or 'no'} findings")
