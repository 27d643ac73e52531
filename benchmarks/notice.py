"""Cost for the other workers when the end of a machine is announced.

The job has two hosts with two workers each. One host announces its end two seconds ahead. Its workers leave, and
remaining ones are killed after these two seconds. Then the host counts as another machine, and its workers return.

The results are the steps that a survivor had to repeat, broken worlds, workers that had not left in time, and the
longest gap between two steps of a survivor.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from bisect import bisect
from operator import attrgetter
from pathlib import Path

import psutil

import results_output
import tests_on_path  # noqa: F401
from faulted_job import Disturbed, longest_gap, options_of, table_of
from harness.step_lines import repeated

AHEAD_S = 2.0
OTHER = "127.0.0.2"
moment = attrgetter("at")


def told(job: Disturbed, since: int) -> float | None:
    """Return when the driver received the notice."""
    notices = [
        r for r in job.records()[since:] if (r.get("event") or {}).get("type") == "HostLeaving"
    ]
    return float(notices[0]["at"]) if notices else None


def passed(moment: float) -> bool:
    return time.monotonic() > moment


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--notices", type=int, default=20)
    options = parser.parse_args()
    left_ms: list[float] = []
    # when the driver received a notice, and the workers that stayed
    told_at: list[tuple[float, set[int]]] = []
    late = 0
    with tempfile.TemporaryDirectory() as folder:
        goes = Path(folder, "goes")
        says = f'test -e {goes} -a "$ELASTIC_HOST" = {OTHER} && echo {AHEAD_S:g} taken back'
        hosts = f"localhost:2,{OTHER}:2"
        with Disturbed(4, "-H", hosts, "--resume", "--preemption", says) as job:
            for _ in range(options.notices):
                last = job.until(lambda: job.full(200), "a full world", 90)
                known = len(job.records())
                goes.touch()
                heard_at = job.until(functools.partial(told, job, known), "the notice", 20)
                connected = {
                    record["event"]["pid"]: record["event"]["worker"][0]
                    for record in job.records()
                    if (record.get("event") or {}).get("type") == "WorkerConnected"
                }
                going = {step.pid for step in last if connected[step.pid] == OTHER}
                others = {step.pid for step in last} - going
                while any(map(psutil.pid_exists, going)) and time.monotonic() < heard_at + AHEAD_S:
                    time.sleep(0.005)
                left_ms.append((time.monotonic() - heard_at) * 1e3)
                for pid in filter(psutil.pid_exists, going):
                    late += 1
                    os.kill(pid, signal.SIGKILL)
                job.until(functools.partial(passed, heard_at + 3.0), "a second of steps", 10)
                told_at.append((heard_at, others))
                goes.unlink()
            job.finish()
        # only once, because millions of objects may exist
        broke, steps = len(job.actions("BreakWorld")), job.steps()
    stayed = set().union(*(others for _, others in told_at))
    again = repeated(step for step in steps if step.pid in stayed)
    gaps, steady = [], []
    for at, others in told_at:
        near = steps[bisect(steps, at - 0.3, key=moment) : bisect(steps, at + 3.0, key=moment)]
        gaps.append(longest_gap(near, others, at - 0.3, at + 1.5))
        steady.append(longest_gap(near, others, at + 1.5, at + 3.0))
    title = f"a notice {AHEAD_S:g} s ahead: {again} steps made again, {broke} worlds broke, {late} workers too late"
    rows = {
        "longest gap between a survivor's steps": gaps,
        "afterwards, without a departure": steady,
        "from the notice until its workers have gone": left_ms,
    }
    results_output.console().print(table_of(title, "notices", rows))
    figures = {"gap_ms": gaps, "steady_ms": steady, "left_ms": left_ms}
    results_output.write_json(
        options.json, {**figures, "repeated": again, "broken": broke, "late": late}
    )


if __name__ == "__main__":
    main()
