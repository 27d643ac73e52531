"""Time from the command to the end of rank 0's first step, alternating with torchrun and DDP."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measurements
import results_output
from measurements import Mark

LIMIT = 1.3  # of torchrun's time
TIMEOUT_S = 120.0
FIRST_STEP = """
model(torch.ones(2, 10)).sum().backward()
optimizer.step()
if int(os.environ["RANK"]) == 0:
    print("first step", time.time(), flush=True)
"""
ELASTIC = f"""
import os, time
import torch
import horovod.torch as hvd

hvd.init()
os.environ["RANK"] = str(hvd.rank())
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
{FIRST_STEP}"""
DDP = f"""
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{FIRST_STEP}
dist.destroy_process_group()
"""


def started(command: list[str], folder: Path) -> float:
    """Run a job. Return the seconds from its start to its first step."""
    began = time.time()
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    for line in done.stdout.splitlines():
        if "first step" in line:
            return float(line.split()[-1]) - began
    raise SystemExit(f"the script started by {command[0]} completed no step: {done.stderr[-2000:]}")


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    workers = str(options.workers)
    commands = {
        "elasticrun": ["elasticrun", "-np", workers, sys.executable, "elastic_job.py"],
        "elasticrun --min-np 1": ["elasticrun", "-np", workers, "--min-np", "1", sys.executable, "elastic_job.py"],
        "torchrun": ["torchrun", "--nproc-per-node", workers, "ddp_job.py"],
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "elastic_job.py").write_text(ELASTIC)
        (Path(folder) / "ddp_job.py").write_text(DDP)
        for command in commands.values():  # compiles imported modules
            started(command, Path(folder))
        for turn in range(options.rounds):
            for name in measurements.order(list(commands), turn):
                times[name].append(started(commands[name], Path(folder)))
    console = results_output.console()
    table = results_output.table(
        f"from the command to the first step, {workers} workers", "", "s", "x torchrun"
    )
    ratios = {name: measurements.ratio(times[name], times["torchrun"]) for name in commands}
    for name, each in times.items():
        table.add_row(name, measurements.spread(each).text(2), ratios[name].text(2))
    console.print(table)
    marks = [
        Mark(f"{name}, times torchrun", LIMIT, ratios[name].median)
        for name in commands
        if name != "torchrun"
    ]
    results_output.conclude(console, options.json, {"seconds": times}, marks)


if __name__ == "__main__":
    main()
