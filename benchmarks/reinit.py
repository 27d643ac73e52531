"""Time of shutdown() + init(), called repeatedly in all workers of a job at the same time."""

from __future__ import annotations

import statistics
import time

import elastic
import results_output


def rounds(number: int) -> list[float]:
    """Return the milliseconds that each shutdown() + init() takes in this worker. A collective precedes each."""
    import torch

    torch.set_num_threads(1)
    elastic.init()
    times = []
    for _ in range(number):
        elastic.allreduce(torch.ones(4), op=elastic.Sum)
        began = time.perf_counter()
        elastic.shutdown()
        elastic.init()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    found = elastic.launch(rounds, (options.rounds,), np=options.workers, log_level="WARNING")
    slowest = [max(times) for times in zip(*found, strict=True)]
    results_output.console().print(
        f"shutdown() + init() of {options.workers} workers, slowest of each round:"
        f" median {statistics.median(slowest):.1f} ms, max {max(slowest):.1f} ms"
    )
    results_output.write_json(options.json, {"reinit_ms": slowest})


if __name__ == "__main__":
    main()
