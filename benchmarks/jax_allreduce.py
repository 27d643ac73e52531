"""Averages of 25 million parameters held by JAX, and by torch through the same engine, in turn in one run.

python benchmarks/jax_allreduce.py [--ranks 2] [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import distributed

import groups
import results_output
from measurements import Mark

SHAPES = [(1000, 1000)] * 24 + [(1000,)] * 24  # of float32
WARM_UP = 3  # rounds
MARK = 1.3


@dataclass(frozen=True)
class JaxAnswer:
    """Medians in seconds, of the slowest rank in each round."""

    jax_s: float
    torch_s: float

    @property
    def ratio(self) -> float:
        return self.jax_s / self.torch_s


def measure(rounds: int) -> JaxAnswer:
    import jax
    import jax.numpy as jnp

    import elastic.jax
    from elastic.api import ops

    rank = distributed.get_rank()
    tensors = [torch.full(shape, float(rank)) for shape in SHAPES]
    arrays = [jnp.full(shape, float(rank)) for shape in SHAPES]

    def with_jax() -> None:
        found = jax.block_until_ready(elastic.jax.allreduce(arrays))
        assert float(found[0][0, 0]) == (distributed.get_world_size() - 1) / 2

    def with_torch() -> None:
        found = ops.grouped_allreduce(tensors)
        assert float(found[0][0, 0]) == (distributed.get_world_size() - 1) / 2

    times: dict[str, list[float]] = {"jax": [], "torch": []}
    for number in range(WARM_UP + rounds):
        for name, reduce in (("jax", with_jax), ("torch", with_torch)):
            distributed.barrier()
            began = time.perf_counter()
            reduce()
            took = torch.tensor(time.perf_counter() - began)
            distributed.all_reduce(took, distributed.ReduceOp.MAX)
            if number >= WARM_UP:
                times[name].append(float(took))
    return JaxAnswer(statistics.median(times["jax"]), statistics.median(times["torch"]))


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    answer = groups.ask(measure, options.ranks, options.rounds)
    console = results_output.console()
    found = results_output.table(
        f"25 million float32 parameters, {options.ranks} ranks", "", "ms", "to torch"
    )
    found.add_row("elastic.jax.allreduce", f"{answer.jax_s * 1e3:.1f}", f"{answer.ratio:.2f}")
    found.add_row("elastic.grouped_allreduce", f"{answer.torch_s * 1e3:.1f}", "1.00")
    console.print(found)
    marks = [Mark("an average of JAX's arrays, relative to torch's", MARK, answer.ratio)]
    results_output.conclude(console, options.json, {"jax": answer}, marks)


if __name__ == "__main__":
    main()
