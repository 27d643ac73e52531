"""Cost of a gradient reduction in a step, through the APIs of torch and of TensorFlow.

There are two workers and an MLP of 25M parameters. A step of TensorFlow and the same step of torch, each with and
without the reduction, alternate in one job. The cost of the reduction is the difference between the steps with and
without it. The slower rank counts. A step of TensorFlow's own ``MultiWorkerMirroredStrategy`` in a separate job is
shown for comparison.

Then the reduction by itself, of those gradients and of 1,000 small ones: torch's in place, in memory that the ranks
share, where gradients of a step must be copied first; torch's into new tensors; and TensorFlow's, whose tensors are
read-only, so that the results are new tensors.

Limits: the reduction adds at most 1.1 times as much time to TensorFlow's step as to torch's, 1,000 small gradients take
at most 2 ms longer, and a step is faster than with the strategy.

    python benchmarks/tensorflow_step.py --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results_output
import tests_on_path  # noqa: F401
from harness.ports import free_ports
from measurements import Mark, order

WIDTH, LAYERS = 2880, 3  # 25M parameters
BATCH = 16
SMALL = 1000
WARMUP = 5


def median_ms(call: Any, steps: int) -> float:
    call()
    took = []
    for _ in range(steps):
        begin = time.perf_counter()
        call()
        took.append((time.perf_counter() - begin) * 1000)
    return statistics.median(took)


def model_of(tf: Any) -> Any:
    return tf.keras.Sequential(
        [
            tf.keras.Input((WIDTH,)),
            *(tf.keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(LAYERS)),
        ]
    )


def steps_of(tf: Any, hvd: Any, variables: list[Any]) -> tuple[Any, Any]:
    """Return a step on this rank alone, and one with a reduction.

    Gradients are created and used in the graph: passing 1,000 tensors to a function and returning them costs more than
    the reduction.
    """

    @tf.function
    def alone() -> None:
        for variable in variables:
            variable.assign_sub(variable * 0.5)

    @tf.function
    def reduced() -> None:
        gradients = hvd.grouped_allreduce([each * 0.5 for each in variables], name="tensorflow")
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(gradient)

    return alone, reduced


def step_of(tf: Any, hvd: Any) -> Any:
    """Return a training step of the MLP; without ``hvd``, on this rank alone."""
    model, optimizer = model_of(tf), tf.keras.optimizers.SGD(0.01)
    data = tf.random.uniform([BATCH, WIDTH])

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data, training=True))
        if hvd is not None:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return lambda: step().numpy()


def step_of_torch(torch: Any, hvd: Any) -> Any:
    """Return the same step with torch."""
    layers = [
        each
        for _ in range(LAYERS)
        for each in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if hvd is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    data = torch.rand(BATCH, WIDTH)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(data).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def take_turns(hvd: Any, calls: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step of each variant, of the slower rank, with a barrier before each step."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-WARMUP, steps):
        for name in order(list(calls), turn):
            hvd.barrier()
            begin = time.perf_counter()
            calls[name]()
            took[name].append((time.perf_counter() - begin) * 1000)
    of_ranks = hvd.allgather_object(took)
    return {
        name: [max(each) for each in zip(*(took[name] for took in of_ranks), strict=True)][WARMUP:]
        for name in calls
    }


def doors(steps: int) -> dict[str, float]:
    """Measure in a worker."""
    import tensorflow as tf
    import torch

    import horovod.tensorflow as hvd
    import horovod.torch as of_torch

    hvd.init()
    found: dict[str, float] = {}
    shapes = {"25M": [[WIDTH, WIDTH]] * LAYERS, "small": [[16]] * SMALL}
    for kind, each in shapes.items():
        variables = [tf.Variable(tf.random.uniform(shape)) for shape in each]
        ours = [torch.rand(shape) for shape in each]

        alone, reduced = steps_of(tf, hvd, variables)

        def of_ours(ours: Any = ours) -> None:
            of_torch.grouped_allreduce_(ours, name="torch")

        def into_new(ours: Any = ours) -> None:
            of_torch.grouped_allreduce(ours, name="torch, new")

        calls = {"alone": alone, "reduced": reduced, "torch": of_ours, "new": into_new}
        turns: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(4):
            for name, call in calls.items():
                turns[name].append(median_ms(call, steps // 4))
        found[f"{kind} torch"] = statistics.median(turns["torch"])
        found[f"{kind} torch, new tensors"] = statistics.median(turns["new"])
        differences = [r - a for r, a in zip(turns["reduced"], turns["alone"], strict=True)]
        found[f"{kind} tensorflow"] = statistics.median(differences)

    calls = {
        "tensorflow alone": step_of(tf, None),
        "tensorflow": step_of(tf, hvd),
        "torch alone": step_of_torch(torch, None),
        "torch": step_of_torch(torch, of_torch),
    }
    turns = take_turns(of_torch, calls, steps)
    for name, took in turns.items():
        found[f"step of {name}"] = statistics.median(took)
    for name in ("tensorflow", "torch"):
        pairs = zip(turns[name], turns[f"{name} alone"], strict=True)
        found[f"reduction in a step of {name}"] = statistics.median(r - a for r, a in pairs)
    return found if hvd.rank() == 0 else {}


def strategy(steps: int) -> dict[str, float]:
    """Measure in a process that TF_CONFIG describes."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = model_of(tf), tf.keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    data = tf.random.uniform([BATCH, WIDTH])

    def one() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step() -> Any:
        return strategy.run(one)

    took = median_ms(lambda: strategy.experimental_local_results(step())[0].numpy(), steps)
    first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
    return {"step with MultiWorkerMirroredStrategy": took} if first else {}


def answers(command: list[str], environ: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    for line in done.stdout.splitlines():
        if "FOUND " in line:
            found: dict[str, float] = json.loads(line.partition("FOUND ")[2])
            return found
    raise SystemExit(f"{command} printed no result: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def beside(steps: int, environ: dict[str, str]) -> dict[str, float]:
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = [sys.executable, __file__, "--steps", str(steps), "--as", "strategy"]
    tasks = [
        environ
        | {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}
            )
        }
        for i in range(2)
    ]
    other = subprocess.Popen(
        command, env=tasks[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return answers(command, tasks[0])
    finally:
        try:
            other.wait(60)
        except subprocess.TimeoutExpired:
            other.kill()


def marks_of(found: dict[str, float]) -> list[Mark]:
    of_torch, of_tensorflow = (
        found[f"reduction in a step of {door}"] for door in ("torch", "tensorflow")
    )
    strategy_ms = found["step with MultiWorkerMirroredStrategy"]
    more_ms = found["small tensorflow"] - found["small torch"]
    return [
        Mark("the reduction in a step, beside torch's", 1.1, of_tensorflow / of_torch),
        Mark("a step, beside its strategy", 1.0, found["step of tensorflow"] / strategy_ms),
        Mark("1,000 small ones, ms more than torch's", 2.0, more_ms),
    ]


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--as", dest="role", choices=["doors", "strategy"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        found = doors(args.steps) if args.role == "doors" else strategy(args.steps)
        print("FOUND " + json.dumps(found) if found else "", flush=True)
        return
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    run = str(Path(sys.executable).with_name("elasticrun"))
    command = [sys.executable, __file__, "--steps", str(args.steps), "--as", "doors"]
    found = answers([run, "-np", "2", *command], environ) | beside(args.steps, environ)
    table = results_output.table(
        "TensorFlow beside torch, 2 workers", "ms", "torch", "TensorFlow", "ratio"
    )
    rows = {
        "a step alone": ("step of torch alone", "step of tensorflow alone"),
        "a step": ("step of torch", "step of tensorflow"),
        "the reduction in it": (
            "reduction in a step of torch",
            "reduction in a step of tensorflow",
        ),
        "25M by themselves": ("25M torch", "25M tensorflow"),
        "25M, into new tensors": ("25M torch, new tensors", "25M tensorflow"),
        "1,000 small ones": ("small torch", "small tensorflow"),
        "1,000, into new tensors": ("small torch, new tensors", "small tensorflow"),
    }
    for what, (ours, theirs) in rows.items():
        ratio = f"{found[theirs] / found[ours]:.2f}"
        table.add_row(what, f"{found[ours]:.1f}", f"{found[theirs]:.1f}", ratio)
    other = found["step with MultiWorkerMirroredStrategy"]
    share = f"{found['step of tensorflow'] / other:.2f}"
    table.add_row(
        "a step, beside its strategy", f"{other:.1f}", f"{found['step of tensorflow']:.1f}", share
    )
    console = results_output.console()
    console.print(table)
    results_output.conclude(console, args.json, found, marks_of(found))


if __name__ == "__main__":
    main()
