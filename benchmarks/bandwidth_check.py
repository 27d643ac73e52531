"""Delay of training while the bandwidth of a host is measured, in network namespaces. Needs root.

One of four hosts has a slow link, so it is rejected and measured again and again while the others train. The longest
time between two commits of a worker during a measurement is compared with the longest one between two measurements.
Those intervals are shorter, so the delay is overestimated rather than underestimated.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import results_output
import tests_on_path  # noqa: F401
from elastic.driver.events import BandwidthMeasured, MeasureBandwidth
from elastic.driver.journal.entries import Entry
from elastic.driver.journal.journal import read
from harness.waiting import wait_until
from measurements import Mark, spread
from stress.hosts.cluster import START_S, HostCluster
from stress.hosts.steps import WorkerNotes

SLOW, TRAINING = "d", ("a", "b", "c")
AFTER_S = 0.2  # the step that a measurement delays may end after it
DELAY_MS = 50.0  # limit of the delay

Window = tuple[float, float]


def measurements(entries: Iterable[Entry]) -> list[Window]:
    """Return the time of the request and of the result of each measurement, in seconds on the journal's clock."""
    found: list[Window] = []
    began = None
    for entry in entries:
        if isinstance(entry.event, BandwidthMeasured) and began is not None:
            found.append((began, entry.at))
            began = None
        if any(isinstance(action, MeasureBandwidth) for action in entry.actions):
            began = entry.at
    return found


def longest_gaps(workers: Iterable[WorkerNotes], windows: Sequence[Window]) -> list[float]:
    """Return the longest time between two commits of a worker that overlaps each window, in milliseconds."""
    gaps = [pair for worker in workers for pair in pairwise(note.at for note in worker.commits())]
    return [
        1e3 * max((b - a for a, b in gaps if b >= begin and a <= end), default=0.0)
        for begin, end in windows
    ]


def quiet_windows(busy: Sequence[Window]) -> Iterator[Window]:
    """Yield the intervals between a measurement, with the step that it may delay, and the next measurement."""
    for (_, end), (later, _) in pairwise(busy):
        if later - end > 2 * AFTER_S:
            yield end + AFTER_S, later


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--measurements", type=int, default=20)
    parser.add_argument("--rate", default="10mbit", help="of the slow link (default: 10mbit)")
    options = parser.parse_args()

    with (
        tempfile.TemporaryDirectory() as folder,
        HostCluster(Path(folder)) as cluster,
        cluster.job("slow link") as job,
    ):
        cluster.network.slow(SLOW, options.rate)
        job.start_driver_by_ssh("--health-check", "auto")
        since = job.trains(TRAINING, timeout=START_S)

        def measured() -> list[Window]:
            _, entries = read(job.journals[0])
            return [each for each in measurements(entries) if each[0] > since]

        wanted = options.measurements
        limit_s = 60.0 + 20.0 * wanted
        wait_until(lambda: len(measured()) >= wanted, "measurements", limit_s, look_s=0.5)
        busy = measured()
        workers = [each for each in job.workers() if each.host in TRAINING]
        cluster.network.heal(SLOW)
        job.finish()

    during = longest_gaps(workers, [(begin, end + AFTER_S) for begin, end in busy])
    quiet = longest_gaps(workers, [*quiet_windows(busy)])
    title = "longest time between two commits of a worker, ms"
    table = results_output.table(title, "", "windows", "median (quartiles)", "largest")
    for name, values in (("bandwidth is measured", during), ("nothing is measured", quiet)):
        table.add_row(name, str(len(values)), spread(values).text(0), f"{max(values):.0f}")
    console = results_output.console()
    console.print(table)
    lasted = statistics.median(end - begin for begin, end in busy)
    console.print(f"median duration of a measurement: {1e3 * lasted:.0f} ms")
    delay = statistics.median(during) - statistics.median(quiet)
    mark = Mark("delay of a step by a measurement, ms (median)", DELAY_MS, delay)
    console.print(mark.sentence())
    results_output.write_json(options.json, {"during_ms": during, "quiet_ms": quiet})
    sys.exit(not mark.met)


if __name__ == "__main__":
    main()
