"""Run one job under faults: start it, follow its journal, and inject the faults that are due.

`plan` decides which faults are due, and `injector` injects them. The loop in this module checks the journal about
fifty times a second. However the loop ends, including by Ctrl-C, lasting faults are undone, and a job that still runs
is terminated.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from elastic.chaos.harness.journal_tail import JobProgress, JournalTail
from elastic.chaos.inject.bit_flips import BitFlips
from elastic.chaos.inject.injector import MARK, Injector, NotOurs
from elastic.chaos.inject.plan import Fault, Injected, Plan, Schedule, choose
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import DIR
from elastic.driver.settings import Settings
from elastic.errors import Invalid

LOOK_S = 0.02  # seconds between checks of the journal
# seconds to wait for the job to react to Ctrl-C, which the terminal sends to the job as well
HEED_S = 2.0
END_S = 60.0  # seconds beyond --leave-timeout within which the job must end after a stop request

Turn = Callable[[JobProgress, int, float], None]


@dataclass(frozen=True)
class Job:
    """Validated elasticrun command, with its journal."""

    words: list[str]
    journal: Path
    settings: Settings


@dataclass(frozen=True)
class FaultyJob:
    """Result of a finished job and the faults that were injected into it."""

    job: Job
    code: int
    injected: list[Injected]
    spared: int  # number of random faults that were skipped because no victim was allowed
    planned: int = 0  # number of faults in the plan
    # planned faults that were not injected, with the reason
    missed: list[str] = field(default_factory=list)


def print_line(text: str) -> None:
    """Print a message of `chaos run` on its own line in the job's output."""
    print(f"chaos   | {time.strftime('%H:%M:%S')} | {text}", file=sys.stderr, flush=True)


def under_fire(
    job: Job,
    plan: Plan,
    *,
    digests: bool = True,
    env: Mapping[str, str] | None = None,
    each_turn: Turn | None = None,
    output: IO[bytes] | None = None,
) -> FaultyJob:
    """Run the job under faults until it ends.

    Args:
        each_turn: called at each check of the journal, with the job's progress, the driver's process ID and the
            monotonic time in seconds.
        env: variables added to the job's environment.
        output: stream to which the job writes (default: the output of this process).
    """
    mark = secrets.token_hex(8)
    environ = {**os.environ, **(env or {}), MARK: mark}
    if digests:
        environ["ELASTIC_DIGESTS"] = "1"
    job.journal.parent.mkdir(mode=0o700, exist_ok=True)
    flips = None
    if plan.flips():
        seed = plan.chance.seed if plan.chance is not None else None
        rules = job.journal.with_suffix(f".{mark}.rules")
        flips = BitFlips(rules, Storage(job.settings.env[DIR]), random.Random(seed))
        environ |= flips.environ
    # The journal of an earlier job would contain outdated process IDs.
    job.journal.write_bytes(b"")
    try:
        process = subprocess.Popen(job.words, env=environ, stdout=output, stderr=output)
    except OSError as error:
        raise Invalid(
            f"the program {job.words[0]} can't be started: {error.strerror}. Pass an executable after --"
        ) from None
    fire = _Fire(plan, Injector(mark, print_line, flips))
    follower = JournalTail(job.journal, JobProgress())
    try:
        with _stopping(process) as stop:
            while process.poll() is None:
                now = time.monotonic()
                story = follower.look()
                fire.turn(
                    story, now, calm=lambda: stop.asked_at is not None or process.poll() is not None
                )
                stop.see_to_it(story, now)
                if each_turn is not None:
                    each_turn(story, process.pid, now)
                time.sleep(fire.rest_s(time.monotonic()))
    finally:
        fire.injector.close(time.monotonic())
        _end(process)
    fire.injector.judge()
    code = process.returncode
    never = fire.schedule.left()
    for fault in never:
        print_line(f"not injected: {fault}")
    return FaultyJob(
        job,
        code if code >= 0 else 128 - code,
        fire.injector.done,
        fire.spared,
        len(plan.faults),
        [*fire.failed, *(f"not injected: {fault}" for fault in never)],
    )


class _Fire:
    """Injector that begins the faults of a plan when they are due."""

    def __init__(self, plan: Plan, injector: Injector) -> None:
        self.injector = injector
        self.schedule = Schedule(plan)
        self.spared = 0
        self.failed: list[str] = []
        self._spare = plan.chance.spare if plan.chance is not None else ()
        # A separate random generator, because the number of draws for victims depends on the job, while the times of
        # faults must depend only on the seed.
        self._dice = random.Random(plan.chance.seed if plan.chance is not None else None)

    def turn(self, story: JobProgress, now: float, *, calm: Callable[[], bool]) -> None:
        """Inject the faults that are due.

        Args:
            calm: called before each fault. If it returns True, no further fault begins and lasting faults end.
        """
        if calm() or story.ending:
            self.injector.close(now)
            return
        self.injector.turn(now)
        if story.began_at is None:
            return
        due = self.schedule.due(
            since_s=now - story.began_at, commits=story.commits, generation=story.generation
        )
        for fault in due:
            if not calm():
                self._do(fault, story)
            elif not fault.drawn:
                self.schedule.put_off(fault)

    def rest_s(self, now: float) -> float:
        """Return the seconds until `turn` must be called again."""
        next_at = self.injector.next_at()
        return LOOK_S if next_at is None else min(LOOK_S, max(0.0, next_at - now))

    def _do(self, fault: Fault, story: JobProgress) -> None:
        victims = choose(
            fault,
            members=story.present(),
            arrived=story.arrived(),
            suffering=self.injector.suffering(time.monotonic()),
            spare=self._spare,
            dice=self._dice,
        )
        if not victims and fault.drawn:
            self.spared += 1
        elif not victims:
            self.schedule.put_off(fault)
        hit, why = False, ""
        for worker in victims:
            place = (story.members.index(worker), len(story.members))
            try:
                self.injector.inject(fault, worker, story.pids, place, time.monotonic())
                hit = True
            except (NotOurs, OSError) as error:
                why = str(error)
                print_line(f"could not {fault.what()}: {error}")
        if victims and not hit and not fault.drawn:
            self.failed.append(f"not injected: {fault}: {why}")


class _Stop:
    """Handler of signals that request the end of the run.

    The signal is forwarded to the job, unless it came from a terminal, which has then already sent it to the job.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.asked_at: float | None = None
        self._process = process
        self._passed_on = False

    def heed(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        if number != signal.SIGINT:
            self._pass_on()

    def see_to_it(self, story: JobProgress, now: float) -> None:
        if self.asked_at is None:
            return
        if now > self.asked_at + HEED_S and not story.ending:
            self._pass_on()
        if now > self.asked_at + END_S:
            self._process.kill()

    def _pass_on(self) -> None:
        if not self._passed_on:
            self._passed_on = True
            self._process.terminate()


@contextlib.contextmanager
def _stopping(process: subprocess.Popen[bytes]) -> Iterator[_Stop]:
    stop = _Stop(process)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop.heed) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
