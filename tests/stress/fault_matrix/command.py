"""`python -m tests.stress matrix`: every fault in every phase, on real processes. docs/faults.md has the outcomes.

Results are appended to a file, so that an interrupted run can be continued: cells that have passed are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic.chaos.inject.network_isolation import check_partition
from elastic.errors import Invalid
from stress.fault_matrix import cells as faults
from stress.fault_matrix import expectations, page, run_cell
from stress.fault_matrix.cells import Cell
from stress.fault_matrix.expectations import Result
from stress.fault_matrix.job import MatrixJob

RESULTS = Path("out", "matrix", "results.jsonl")
PAGE = Path("docs", "faults.md")

AXES = {"victim": faults.VICTIMS, "fault": faults.FAULTS, "phase": faults.PHASES}

EXAMPLES = """\
examples:
  python -m tests.stress matrix --pairwise
  python -m tests.stress matrix --only victim=driver,fault=SIGKILL
  python -m tests.stress matrix --sharded --jobs 2
"""


@dataclass(frozen=True)
class Choice:
    """Selected cells, the number of parallel jobs and the file of the results."""

    cells: list[Cell]
    jobs: int
    results: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pairwise", action="store_true", help="run a small set of cells that covers every pair")
    add(
        "--only",
        metavar="WHAT",
        action="append",
        default=[],
        help="run only these cells: victim=driver,phase=bucket",
    )
    add("--skip", metavar="WHAT", action="append", default=[], help="leave these cells out")
    add("--sharded", action="store_true", help="run only the phases of a sharded state")
    add("--again", action="store_true", help="also run cells that passed before")
    add("--list", action="store_true", help="print the cells and exit")
    add(
        "--no-run",
        action="store_true",
        help="run nothing; write the page of --report from earlier results",
    )
    add("--jobs", type=int, default=1, metavar="N", help="parallel jobs (default: 1)")
    add("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default: {RESULTS}")
    add("--report", type=Path, metavar="FILE", help=f"write the page to FILE, such as {PAGE}")


def main(options: argparse.Namespace) -> int:
    chosen = choose(options)
    if options.jobs < 1:
        raise Invalid(f"--jobs is {options.jobs}: pass 1 or more")
    if options.list:
        for cell in chosen:
            print(f"{cell}: {faults.impossible(cell) or expectations.expected(cell).end.value}")
        return 0
    done = {} if options.again else {c: r for c, r in read(options.results).items() if r.passed}
    todo = [cell for cell in chosen if not faults.impossible(cell) and cell not in done]
    todo = [] if options.no_run else todo
    here = [cell for cell in todo if not not_here(cell)]
    for cell in set(todo) - set(here):
        print(f"not run here: {cell}: {not_here(cell)}")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    run(Choice(here, options.jobs, options.results))
    results = read(options.results)
    if options.report is not None:
        options.report.write_text(page.page(results, not_here=not_here))
    failed = [r for c, r in results.items() if c in chosen and not r.passed]
    for result in failed:
        print(f"FAILED {result.cell}: {result.said}")
    passed = sum(c in results and results[c].passed for c in chosen)
    print(f"{passed} cells passed, {len(failed)} failed, {len(set(todo) - set(here))} not run here")
    return 1 if failed else 0


def choose(options: argparse.Namespace) -> list[Cell]:
    """Return the selected cells. Raises Invalid."""
    cells = list(faults.all_cells())
    if options.pairwise:
        cells = expectations.pairwise(cell for cell in cells if not faults.impossible(cell))
    if options.sharded:
        cells = [c for c in cells if expectations.kind_of(c) is expectations.JobKind.SHARDED]
    for text in options.only:
        wanted = conditions(text)
        cells = [cell for cell in cells if _is(cell, wanted)]
    for text in options.skip:
        unwanted = conditions(text)
        cells = [cell for cell in cells if not _is(cell, unwanted)]
    return cells


def _is(cell: Cell, wanted: Mapping[str, str]) -> bool:
    return all(getattr(cell, axis) == value for axis, value in wanted.items())


def conditions(text: str) -> dict[str, str]:
    """Parse a selection such as ``victim=rank 0,fault=SIGSTOP, SIGCONT`` into values by axis. Raises Invalid."""
    found: dict[str, str] = {}
    axis = ""
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if equals:
            axis = name.strip()
            found[axis] = value
        elif axis:  # this value contains a comma
            found[axis] += f",{word}"
        else:
            raise Invalid(
                f"{text!r} does not select cells: write it as in victim=driver,phase=bucket"
            )
    for axis, value in found.items():
        if axis not in AXES:
            raise Invalid(f"{text!r}: {axis!r} is not one of {', '.join(AXES)}")
        if value not in AXES[axis]:
            raise Invalid(
                f"{text!r}: unknown {axis} {value!r}; choose from {'; '.join(AXES[axis])}"
            )
    return found


def not_here(cell: Cell) -> str:
    """Return why a possible cell can't be run on this machine by this user; empty if it can."""
    if faults.impossible(cell):
        return ""
    if cell.fault == faults.DROP:
        return _no_partition()
    if cell.victim == faults.DRIVER and cell.fault == faults.DISK and os.geteuid() != 0:
        return "only root can mount a small full disk"
    return ""


_partition: list[str] = []


def _no_partition() -> str:
    if not _partition:
        try:
            check_partition()
            _partition.append("")
        except Invalid as error:
            _partition.append(str(error))
    return _partition[0]


# ---- running -------------------------------------------------------------------------------------


def run(choice: Choice) -> None:
    """Run every cell, with several cells per job; results are written to the file immediately.

    On an interrupt, end the running jobs and discard their further results.
    """
    jobs = expectations.batches(choice.cells)
    done = Progress(len(choice.cells), choice.results)
    with ThreadPoolExecutor(choice.jobs) as pool:
        try:
            for each in [pool.submit(run_batch, batch, done) for batch in jobs]:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            done.stop()
            raise


class Progress:
    """Writes the results and prints the progress. Thread-safe."""

    def __init__(self, cells: int, path: Path) -> None:
        self._cells, self._path = cells, path
        self._done = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._jobs: set[MatrixJob] = set()
        self._stopped = False

    @contextlib.contextmanager
    def under_way(self, job: MatrixJob) -> Iterator[None]:
        """Register a job, and close it at the end in any case."""
        with self._lock:
            self._jobs.add(job)
        try:
            self.go_on()
            yield
        finally:
            job.close()
            with self._lock:
                self._jobs.discard(job)

    def stop(self) -> None:
        """Close all jobs; a thread that waits for one of their processes sees it exit."""
        with self._lock:
            self._stopped = True
            jobs = list(self._jobs)
        for job in jobs:
            job.close()

    def go_on(self) -> None:
        """Raise CancelledError after `stop`."""
        if self._stopped:
            raise CancelledError

    def show(self, result: Result) -> None:
        """Print the result of a cell; it is final only when its job has ended."""
        self.go_on()
        with self._lock:
            self._done += 1
            what = "ok" if result.passed else "FAILED"
            took = f" {result.ms:.0f} ms" if result.ms is not None else ""
            spent = time.monotonic() - self._began
            print(f"{spent:6.0f} s {self._done:4}/{self._cells} {what:6} {result.cell}{took}")
            print(f"         {result.said}\n" * bool(result.said), end="", flush=True)

    def write(self, results: Sequence[Result]) -> None:
        self.go_on()
        with self._lock, self._path.open("a") as file:
            for result in results:
                record = {**asdict(result.cell), "passed": result.passed, "ms": result.ms}
                record |= {"record": result.said, "date": time.strftime("%Y-%m-%d")}
                file.write(json.dumps(record) + "\n")


def run_batch(cells: Sequence[Cell], done: Progress) -> None:
    """Run one job. If a cell fails, the cells after it are run in another job."""
    while cells:
        results, keep = one_job(cells, done)
        done.write(results)
        cells = cells[len(results) :]
        if keep is not None:
            print(f"         everything of that job is in {keep}", flush=True)


def one_job(cells: Sequence[Cell], done: Progress) -> tuple[list[Result], Path | None]:
    """Return the results of the cells that the job completed, and its folder if something was wrong."""
    small = any(c.victim == faults.DRIVER and c.fault == faults.DISK for c in cells)
    folder = Path(tempfile.mkdtemp(prefix="elastic-matrix-"))
    shared = not any(map(expectations.shuts_connections, cells))
    kind = expectations.kind_of(cells[0])
    job = MatrixJob(folder, kind=kind, small_disk=small, shared_memory=shared)
    results: list[Result] = []
    with done.under_way(job):
        if not expectations.is_first(cells[0]):
            job.start()
        for cell in cells:
            results.append(run_cell.run(job, cell, len(results)))
            done.show(results[-1])
            if not results[-1].passed:
                break
        if results[-1].passed:
            trouble = job.finish()
            if trouble:  # trouble of the whole job: the cell that caused it is unknown
                print(f"         FAILED as a whole: {trouble}", flush=True)
                names = "; ".join(str(r.cell) for r in results)
                said = f"in a job of {names}: {trouble}"
                results = [Result(r.cell, False, r.ms, said) for r in results]
    if all(result.passed for result in results):
        shutil.rmtree(folder)
        return results, None
    return results, folder


def read(path: Path) -> dict[Cell, Result]:
    """Return the latest result of each cell."""
    results: dict[Cell, Result] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            if line.strip():
                record = json.loads(line)
                cell = Cell(record["victim"], record["fault"], record["phase"])
                results[cell] = Result(
                    cell, record["passed"], record["ms"], record["record"], record["date"]
                )
    return results
