"""Run of one cell of the fault matrix in a job, with a check of its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec

from elastic.driver.reasons import Reason
from harness import wording
from stress.fault_matrix import cells, expectations, external_faults
from stress.fault_matrix.cells import Cell
from stress.fault_matrix.expectations import MOMENT_S, WORKERS, Expected, ExpectedEnd, Result
from stress.fault_matrix.job import MatrixJob, Unexpected
from stress.fault_matrix.journal_facts import COMMITS, named

FULL_S = 60.0  # seconds for a job to have all its workers training
CELL_S = 60.0  # time for a cell to end as expected
AHEAD = 10  # steps from now until several workers are hit

Turn = Callable[[], None]


def run(job: MatrixJob, cell: Cell, number: int) -> Result:
    """Run a cell, the ``number``-th of its job; start the job if necessary."""
    try:
        return _run(job, cell, f"cell{number}")
    except Unexpected as trouble:
        return Result(cell, False, said=str(trouble))


def _run(job: MatrixJob, cell: Cell, name: str) -> Result:
    story = job.story
    members = [f"localhost:{slot}#1" for slot in range(WORKERS)]  # members of the first world
    if job.started:
        all_there = "all workers training before the fault, and a spare process"
        job.until(lambda: story.full and job.has_spare(), all_there, FULL_S)
        members = list(story.members)
    go = job.folder / f"{name}.go"
    injected = expectations.fault_rules(
        cell, members, story.newest, name, str(go), step=job.step() + AHEAD
    )
    since = len(story.entries)
    job.arm(injected.rules)
    if not job.started:
        job.start()
    if cell.phase == cells.SHUTDOWN:
        job.over.touch()
    struck = job.struck(name, injected.victims, CELL_S)
    victims = {each["worker"] for each in struck}
    at = max(each["at"] for each in struck)
    with contextlib.ExitStack() as stack:
        each_turn = external_faults.act(job, cell, struck, go, stack)
        if go.exists():
            at = time.monotonic()
        _await_end(job, cell, victims, since, each_turn)
    job.arm([])
    return Result(cell, True, _recovery_ms(job, cell, victims, at))


def _recovery_ms(job: MatrixJob, cell: Cell, victims: set[str], at: float) -> float | None:
    """Return the time from the fault to the first report that all train again, if there was something to recover
    from.
    """
    recovers = expectations.expected(cell).end in (
        ExpectedEnd.REGROUPS,
        ExpectedEnd.RECOVERS,
        ExpectedEnd.LEAVES,
    )
    if not recovers or expectations.is_first(cell) or not victims & job.story.ever:
        return None
    after = job.story.recovered_at(at)
    return None if after is None else (after - at) * 1e3


def _await_end(job: MatrixJob, cell: Cell, victims: set[str], since: int, each_turn: Turn) -> None:
    wanted, story = expectations.expected(cell), job.story
    match wanted.end:
        case ExpectedEnd.GOES_ON:
            _goes_on(job, cell, victims, since, each_turn)
        case ExpectedEnd.REGROUPS:
            job.until(lambda: story.broken(since), "a broken world", CELL_S, each_turn)
            job.until(lambda: story.full, "all training again", CELL_S, each_turn)
            job.must(victims <= set(story.members), f"{_list(victims)} lost a place")
        case ExpectedEnd.RECOVERS | ExpectedEnd.LEAVES:
            job.until(
                lambda: victims <= story.exited.keys(), "the victims' exits", CELL_S, each_turn
            )
            job.until(lambda: story.full, "all places filled again", CELL_S, each_turn)
            _check_exits(job, wanted, victims, since)
        case ExpectedEnd.JOB_ENDS:
            _ends_with(job, 1, each_turn)
            job.must("Traceback" in job.program.output, "the job ended without a traceback")
        case ExpectedEnd.STOPS:
            job.must(job.ends(each_turn) != 0, "SIGTERM at the driver ended in success")
        case ExpectedEnd.ALL_GONE:
            job.ends(each_turn)
        case ExpectedEnd.FAILS:
            _ends_with(job, 1, each_turn)
        case ExpectedEnd.SUCCEEDS:
            if cell.victim == cells.DRIVER and cell.phase != cells.SHUTDOWN:
                job.until(
                    lambda: wording.JOURNAL_ENDS in job.program.output,
                    "the warning that the journal ends",
                    CELL_S,
                )
                job.over.touch()
            _ends_with(job, 0, each_turn)
    if wanted.end in expectations.LAST_OF_ITS_JOB:
        job.nothing_left()


def _goes_on(job: MatrixJob, cell: Cell, victims: set[str], since: int, each_turn: Turn) -> None:
    """Wait until all commit again, at least for the duration of the fault, and check that no worker is missing."""
    story = job.story
    lasts = cell.fault in (cells.STOP, cells.GIL) or cell.victim == cells.DRIVER
    until = time.monotonic() + (MOMENT_S + 1.0 if lasts else 0.0)
    awaited = set() if cell.victim == cells.DRIVER else victims
    seen: list[tuple[int, int]] = []

    def trained() -> bool:
        if time.monotonic() < until or not story.full or not awaited <= set(story.members):
            return False
        seen.append((story.generation, story.commits))
        return seen[-1] > (seen[0][0], seen[0][1] + COMMITS)

    job.until(trained, "commits with all workers", CELL_S, each_turn)
    lost = victims & story.exited.keys()
    job.must(not lost, f"{_list(lost)} should not have ended")
    disturbed = expectations.is_disturbed(cell) or expectations.is_first(cell)
    job.must(disturbed or not story.broken(since), "a world broke without a reason")


def _check_exits(job: MatrixJob, wanted: Expected, victims: set[str], since: int) -> None:
    story = job.story
    back = victims & set(story.members)
    job.must(not back, f"{_list(back)} has ended and is a member")
    kills = story.actions("KillWorker", since)
    killed = {named(a["worker"]): msgspec.convert(a["reason"], Reason) for a in kills}
    for worker in victims:
        reason = killed.pop(worker, None)
        if wanted.fenced:
            found = reason or "it was not fenced"
            kinds = " or ".join(why.value for why in wanted.fenced)
            awaited = f"{worker} should have been fenced as {kinds}: {found}"
            job.must(reason is not None and reason.kind in wanted.fenced, awaited)
        else:
            job.must(reason is None, f"{worker} was killed: {reason}")
        if wanted.end is ExpectedEnd.LEAVES:
            code = story.exited[worker]
            job.must(code == 0, f"{worker} left with exit code {code}")
    reasons = ", ".join(map(str, killed.values()))
    job.must(not killed, f"{_list(killed)} was killed without a reason: {reasons}")


def _ends_with(job: MatrixJob, code: int, each_turn: Turn) -> None:
    found = job.ends(each_turn)
    job.must(found == code, f"elasticrun ended with exit code {found}, not {code}")


def _list(workers: Iterable[str]) -> str:
    return ", ".join(sorted(workers))
