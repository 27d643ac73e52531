"""The fault matrix on real processes: a few cells that cover every pair of victim, fault and phase.

Those of a few jobs, which have every victim, every fault and every phase, run always, the others nightly. The whole
matrix is run by `make matrix`, which also writes docs/faults.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic.chaos.fault_matrix import cells, command, expectations
from elastic.chaos.fault_matrix.cells import Cell
from elastic.chaos.fault_matrix.command import Progress
from elastic.chaos.fault_matrix.expectations import Batch

AT_A_TIME = 2  # jobs: while one waits for its workers to start, another waits for a lease
CHOSEN = expectations.pairwise(c for c in cells.all_cells() if not cells.impossible(c))
HERE = [cell for cell in CHOSEN if not command.not_here(cell)]
JOBS = expectations.batches(HERE)


def values(cells: Iterable[Cell]) -> set[str]:
    return {value for cell in cells for value in (cell.victim, cell.fault, cell.phase)}


def covering(jobs: Sequence[Batch]) -> set[int]:
    """Numbers of a few jobs that have every value which occurs in any of them."""
    missing = values(cell for job in jobs for cell in job.cells)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(jobs)), key=lambda n: len(missing & values(jobs[n].cells)))
        missing -= values(jobs[best].cells)
        chosen.add(best)
    return chosen


ALWAYS = covering(JOBS)


def job_of(number: int) -> Any:
    """With the name of the last of its cells."""
    cells, marks = JOBS[number].cells, [] if number in ALWAYS else [pytest.mark.nightly]
    return pytest.param(number, id=f"{cells[-1]} and {len(cells) - 1}", marks=marks)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> Iterator[tuple[dict[int, Future[None]], Path]]:
    """What becomes of each job that is asked for. All are begun at once, some at a time."""
    called = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    asked = [params["number"] for params in called if "number" in params]
    file = tmp_path_factory.mktemp("matrix") / "results.jsonl"
    done = Progress(sum(len(JOBS[number].cells) for number in asked), file)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {n: pool.submit(command.run_batch, JOBS[n], done) for n in asked}
        yield futures, file
        for future in futures.values():
            future.cancel()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [job_of(number) for number in range(len(JOBS))])
def test_every_cell_of_a_job_ends_as_it_should(results, number):
    futures, file = results
    futures[number].result(timeout=600)
    found = command.read(file)
    missing = [str(cell) for cell in JOBS[number].cells if cell not in found]
    assert not missing
    failed = [found[cell] for cell in JOBS[number].cells if not found[cell].passed]
    assert not failed, "\n".join(f"{result.cell}: {result.said}" for result in failed)


@pytest.mark.parametrize("cell", [cell for cell in CHOSEN if cell not in HERE], ids=str)
def test_a_cell_that_can_not_be_run_here_says_why(cell: Cell):
    pytest.skip(f"{cell}: {command.not_here(cell)}")


@pytest.mark.timeout(300)
def test_a_cell_that_does_not_end_as_it_should_fails_and_says_what_was_seen(
    tmp_path, monkeypatch, capsys
):
    """A matrix that can't fail proves nothing: here a killed worker is wrongly expected to leave."""
    cell = Cell(cells.LAST, cells.KILL, cells.FORWARD)
    leaves = expectations.Expected(expectations.End.LEAVES, "wrong on purpose")
    monkeypatch.setattr(expectations, "expected", lambda _: leaves)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "results.jsonl"
    command.run_batch(Batch([cell]), Progress(1, file))
    result = command.read(file)[cell]
    assert not result.passed
    assert "left with exit code -9" in result.said
    assert "FAILED last | SIGKILL | forward" in capsys.readouterr().out
