"""Time lost by a killed worker: from SIGKILL of a random worker to the slowest survivor's next step in the new world.

For comparison, the same loss is measured with bare Gloo in the same run: processes that only allreduce are notified by
their parent immediately, destroy the group, create a new one, and allreduce again.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import results_output
import tests_on_path  # noqa: F401
from faulted_job import Disturbed, options_of, table_of
from harness.step_lines import committed_lost

BACK_SOON = ["--preload=auto", "--slot-attempts=50", "--blacklist-cooldown-range", "0.1", "0.2"]

# ---- the reference -------------------------------------------------------------------------------


def _bare_worker(orders: Connection) -> None:
    import torch
    from torch import distributed

    c10d: Any = distributed  # the stubs lack functions that this benchmark uses
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    torch.set_num_threads(1)
    group: Any = None
    while True:
        order = orders.recv()
        if order is None:
            os._exit(0)
        generation, rank, size, port = order
        del group
        store = c10d.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20))
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [
            c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)
        ]
        options._timeout = timedelta(seconds=20)
        group = c10d.ProcessGroupGloo(c10d.PrefixStore(f"{generation}", store), rank, size, options)
        tensor = torch.ones(10_000)
        group.allreduce([tensor]).wait()
        orders.send(time.monotonic())
        try:
            while True:
                group.allreduce([tensor]).wait()
                time.sleep(0.005)
        except RuntimeError:
            pass


def bare_gloo(workers: int, kills: int, rng: random.Random) -> list[float]:
    """Return the milliseconds from the kill to the slowest survivor's next allreduce; with new processes for each
    kill.
    """
    context = multiprocessing.get_context("spawn")
    times = []

    from torch import distributed

    c10d: Any = distributed

    def serve() -> Any:
        """Start a store before the clients connect, so that there is no race between clients and server."""
        return c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    for _ in range(kills):
        pipes = [context.Pipe() for _ in range(workers)]
        processes = [context.Process(target=_bare_worker, args=(p[1],)) for p in pipes]
        for process in processes:
            process.start()
        first, second = serve(), serve()
        for rank, (pipe, _) in enumerate(pipes):
            pipe.send((1, rank, workers, first.port))
        for pipe, _ in pipes:
            pipe.recv()
        time.sleep(0.3)
        victim = rng.randrange(workers)
        killed_at = time.monotonic()
        processes[victim].kill()
        left = [p for i, (p, _) in enumerate(pipes) if i != victim]
        for rank, pipe in enumerate(left):
            pipe.send((2, rank, workers - 1, second.port))
        times.append((max(pipe.recv() for pipe in left) - killed_at) * 1e3)
        for process in processes:
            process.kill()
            process.join()
    return times


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--reference-kills", type=int, default=8)
    parser.add_argument("--ddp", action="store_true", help="train with DistributedDataParallel")
    parser.add_argument("--fsdp", action="store_true", help="train with FSDP2 (fully_shard)")
    parser.add_argument("--zero", action="store_true", help="train with ZeroRedundancyOptimizer")
    parser.add_argument("--width", type=int, default=128, help="of the MLP (%(default)s)")
    parser.add_argument(
        "--example",
        choices=("lightning", "fabric", "transformers", "accelerate", "timm"),
        default="",
        help="examples/NAME_elastic.py, without its pause, instead of the MLP",
    )
    options = parser.parse_args()
    rng = random.Random(options.seed)

    bare = bare_gloo(options.workers, options.reference_kills, rng)
    times, ranks = [], []
    flags = BACK_SOON if options.example else ()  # the example imports for seconds
    ways = ("ddp", "fsdp", "zero")
    way = next((each for each in ways if getattr(options, each)), "")
    training = {"way": way, "script": options.script, "example": options.example}
    training["width"] = options.width
    with Disturbed(options.workers, *flags, **training) as job:
        for _ in range(options.kills):
            strike = job.strike(signal.SIGKILL, rng)
            times.append(strike.lasted_ms)
            ranks.append(strike.victim.rank)
        code = job.finish()
        lost, replicas = committed_lost(job.steps()), job.replicas()
        phases = [a for a in job.actions("ReportRecovery") if a["kind"] == "recovery"]

    title = f"SIGKILL of one of {options.workers} workers -> slowest survivor's next step"
    console = results_output.console()
    console.print(table_of(title, "kills", {"hvd-elastic": times, "bare Gloo rebuild": bare}))
    ratio = statistics.median(times) / statistics.median(bare)
    console.print(
        f"ratio of medians {ratio:.2f}; victims by rank {sorted(ranks)};"
        f" committed steps lost {lost}; {replicas}; exit code {code}"
    )
    if phases:
        names = sorted({n for p in phases for n in p["phases_ms"]})
        means = {n: statistics.median([p["phases_ms"].get(n, 0.0) for p in phases]) for n in names}
        console.print("median ms by phase (slowest worker of each):", means)
    for cost in job.costs():
        console.print("commits of one worker, median ms and bytes:", cost)
    figures = {
        "hvd_elastic_ms": times,
        "bare_gloo_ms": bare,
        "lost": lost,
        "ranks": ranks,
        "replicas": replicas,
    }
    results_output.write_json(options.json, figures)


if __name__ == "__main__":
    main()
