"""A job whose workers report: ``reporting.py drive FLAG...`` is its driver, which appends each report to the file
``reports`` as it comes; ``reporting.py FUNCTION`` a launch of one, which prints what became of it.

A worker counts what it reports. It goes on for as long as the test likes, and is told so by files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0


def until_exists(name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not Path(name).exists():
        assert time.monotonic() < deadline, f"nobody made {name}"
        time.sleep(0.005)


# ---- workers


def few() -> int:
    """Send some reports of each kind, the last one after the training."""
    import light  # type: ignore[import-not-found]  # noqa: F401
    import torch

    import elastic

    elastic.init()
    total = elastic.allreduce(torch.ones(1), op=elastic.Sum, name="ones")
    for step in range(300):
        elastic.report({"step": step, "loss": total / (step + 1), "nan": float("nan")})
    elastic.shutdown()
    elastic.init()
    elastic.report({"step": 300, "text": "x" * 60_000, "nested": {"a": [1, None, True]}})
    return elastic.rank()


def many() -> None:
    """Report more than is kept, while the driver is stopped. The worker must not wait for the driver."""
    import light  # noqa: F401

    import elastic

    elastic.init()
    elastic.report({"n": 0})
    until_exists("stopped")
    for n in range(1, 4000):
        elastic.report({"n": n, "text": "x" * 5000})
    Path("made").touch()
    until_exists("go")


def work() -> None:
    """Train with the others until a file ``go`` exists; report three times a step."""
    import light  # noqa: F401
    import torch

    import elastic

    elastic.init()
    state = elastic.ObjectState(step=0)
    rank = elastic.rank()
    n = 0

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        nonlocal n
        while True:
            met = torch.tensor([float(Path("go").exists())])
            if elastic.allreduce(met, op=elastic.Sum, name="met").item():
                return
            for _ in range(3):
                elastic.report({"samples seen": n, "step": state.step})
                n += 1
            made = Path(f"made.{rank}.new")
            made.write_text(str(n))
            made.rename(f"made.{rank}")
            state.step += 1
            state.commit()
            time.sleep(0.02)

    train(state)
    elastic.report({"samples seen": n, "step": state.step, "last": True})


# ---- commands


def drive(flags: list[str]) -> int:
    from elastic.driver.commandline import cli
    from elastic.driver.job.start import start
    from elastic.monitoring.reporting import Report

    file = os.open("reports", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(report: Report) -> None:
        line = {"driver": os.getpid(), **dataclasses.asdict(report)}
        os.write(file, json.dumps(line).encode() + b"\n")

    command = [sys.executable, str(Path(__file__).resolve()), "work"]
    job = cli.make_job(cli.read_options([*flags, *command], os.environ), dict(os.environ))
    outcome = asyncio.run(start(dataclasses.replace(job, reported=write)))
    last = {rank: report.metrics for rank, report in outcome.reports.items()}
    print("last", json.dumps(last), flush=True)
    return outcome.code


def launched(what: str) -> Any:
    import elastic

    reports: list[elastic.Report] = []
    raised = [0]

    def careless(report: elastic.Report) -> None:
        reports.append(report)
        if report.metrics.get("step") == 100:
            raised[0] += 1
            raise KeyError("no such column")

    np = 2 if what == "few" else 1
    values = elastic.launch({"few": few, "many": many}[what], np=np, on_report=careless)
    numbers: dict[int, list[int]] = {}
    for report in reports:
        assert report.worker == f"localhost:{report.rank}#1" and report.size == np
        assert report.generation >= 1 and abs(time.time() - report.at) < DEADLINE_S
        metrics = report.metrics
        numbers.setdefault(report.rank, []).append(metrics[{"few": "step", "many": "n"}[what]])
    return {
        "values": values,
        "numbers": numbers,
        "raised": raised[0],
        "lines": [reports[0].metrics, reports[-1].metrics] if what == "few" else [],
    }


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        sys.exit(drive(sys.argv[2:]))
    elif sys.argv[1] == "work":
        work()
    else:
        print("result", json.dumps(launched(sys.argv[1])), flush=True)
