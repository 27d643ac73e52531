"""The fault matrix on real processes: a few cells that have every victim, every fault and every phase.

`make nightly` runs those that have every pair of them, too; `make matrix` runs all of them and writes docs/faults.md.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from harness import wording
from harness.forking import SPARE_WORKERS
from stress.fault_matrix import cells, command, expectations
from stress.fault_matrix.cells import Cell
from stress.fault_matrix.command import Progress
from stress.fault_matrix.job import MatrixJob

SPARE = 10  # workers, forked ahead: each cell of a job loses some
AT_A_TIME = 2  # jobs: while one waits for its workers to start, another waits for a lease
CHOSEN = expectations.pairwise(c for c in cells.all_cells() if not cells.impossible(c))
HERE = [cell for cell in CHOSEN if not command.not_here(cell)]
# Jobs with checkpoints, standbys or prepared processes take longer to start: they are left to the night.
PLAIN = [cell for cell in HERE if expectations.kind_of(cell) is expectations.JobKind.PLAIN]
FEW = expectations.covering(PLAIN, 1)


def jobs(chosen: Sequence[Cell], *marks: pytest.MarkDecorator) -> list[ParameterSet]:
    batches = expectations.batches(chosen)
    ids = (f"{batch[-1]} and {len(batch) - 1}" for batch in batches)
    return [pytest.param(b, id=each, marks=marks) for b, each in zip(batches, ids, strict=True)]


JOBS = [*jobs(FEW), *jobs([cell for cell in HERE if cell not in FEW], pytest.mark.nightly)]


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    """Drivers and their first workers are forks of a process that has imported torch; `make matrix` starts them."""
    forked = functools.partial(MatrixJob, forked=True, env={SPARE_WORKERS: str(SPARE)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "MatrixJob", forked)
        yield


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> Iterator[tuple[dict[Cell, Future[None]], Path]]:
    """Return the result of each job, by its last cell. Several run in parallel."""
    file = tmp_path_factory.mktemp("matrix") / "results.jsonl"
    asked = (item for item in request.session.items if item.path == request.path)
    batches = (item.callspec.params.get("batch") for item in asked if hasattr(item, "callspec"))
    chosen: list[list[Cell]] = [batch for batch in batches if batch is not None]
    done = Progress(sum(len(batch) for batch in chosen), file)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {batch[-1]: pool.submit(command.run_batch, batch, done) for batch in chosen}
        yield futures, file
        for future in futures.values():
            future.cancel()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", JOBS)
def test_each_matrix_cell_has_the_expected_end(results, batch):
    futures, file = results
    futures[batch[-1]].result(timeout=600)
    found = command.read(file)
    missing = [str(cell) for cell in batch if cell not in found]
    assert not missing
    failed = [found[cell] for cell in batch if not found[cell].passed]
    assert not failed, "\n".join(f"{result.cell}: {result.said}" for result in failed)


@pytest.mark.parametrize("cell", [cell for cell in CHOSEN if cell not in HERE], ids=str)
def test_a_cell_that_can_not_be_run_here_has_a_reason(cell: Cell):
    pytest.skip(f"{cell}: {command.not_here(cell)}")


@pytest.mark.timeout(300)
def test_matrix_cell_with_an_unexpected_end_fails_and_reports_the_events(
    tmp_path, monkeypatch, capsys
):
    """A matrix that can't fail proves nothing: here a killed worker is wrongly expected to leave."""
    cell = Cell(cells.LAST, cells.KILL, cells.FORWARD)
    leaves = expectations.Expected(expectations.ExpectedEnd.LEAVES, "wrong on purpose")
    monkeypatch.setattr(expectations, "expected", lambda _: leaves)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "results.jsonl"
    command.run_batch([cell], Progress(1, file))
    result = command.read(file)[cell]
    assert not result.passed
    assert wording.LEFT_EXIT_CODE in result.said
    assert "FAILED last | SIGKILL | forward" in capsys.readouterr().out
