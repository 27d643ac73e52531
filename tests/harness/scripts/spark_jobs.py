"""Jobs on Spark, through `horovod.spark`: ``spark_jobs.py MASTER WHAT [NUMBER]``. Prints lines ``WHAT JSON``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from pyspark.sql import SparkSession

import horovod.spark
from elastic.errors import ElasticError


def trained(offset: int) -> list[Any]:
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
    return [hvd.rank() + offset, hvd.size(), hvd.local_rank(), hvd.local_size(), float(total)]


def placed() -> list[str]:
    return [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")]


def raising() -> None:
    raise KeyError(f"lost-by-{os.environ['HOROVOD_RANK']}")


def stepping(steps: int) -> list[int]:
    import torch

    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.step += 1
            if hvd.rank() == 0:
                print(f"step {state.step} of {hvd.size()} at {time.time():.3f}", flush=True)
            time.sleep(0.02)
            state.commit()

    train(state)
    return [hvd.rank(), hvd.size()]


def told(what: str, value: Any) -> None:
    print(what, json.dumps(value), flush=True)


def refused(what: str, call: Any) -> None:
    try:
        told(what, ["", call()])
    except (ElasticError, ValueError) as error:
        told(what, [type(error).__name__, str(error)])


def local() -> None:
    """Short jobs in one session."""
    told("results", horovod.spark.run(trained, args=(10,), num_proc=2))
    told("elastic", horovod.spark.run_elastic(placed, num_proc=2, min_num_proc=1))
    refused("raised", lambda: horovod.spark.run(raising, num_proc=1))
    refused("slots", lambda: horovod.spark.run(placed, num_proc=3))
    refused("elastic slots", lambda: horovod.spark.run_elastic(placed, num_proc=3))
    refused("pickled", lambda: horovod.spark.run(placed, args=(threading.Lock(),), num_proc=1))


def steps(number: int) -> None:
    told("results", horovod.spark.run_elastic(stepping, (number,), num_proc=3, min_num_proc=1))


def growing(number: int) -> None:
    """Begin with one worker. The tasks that wait make Spark add executors."""
    run = horovod.spark.run_elastic
    told("results", run(stepping, (number,), num_proc=1, min_num_proc=1, max_num_proc=3))


class Watching:
    """Standard output, which decommissions an executor at a step."""

    def __init__(self, executor: str, step: int) -> None:
        self._executor = executor
        self._text = f"step {step} "

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        if self._text in text:
            jvm: Any = spark.sparkContext._jvm
            info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
                "for a test", jvm.scala.Option.empty()
            )
            backend = spark.sparkContext._jsc.sc().schedulerBackend()
            told(
                "decommissioned", [backend.decommissionExecutor(self._executor, info, False, False)]
            )

    def flush(self) -> None:
        sys.stdout.flush()


def decommissioned(number: int) -> None:
    run = horovod.spark.run_elastic
    told("results", run(stepping, (number,), num_proc=3, min_num_proc=1, stdout=Watching("1", 20)))


if __name__ == "__main__":
    master, what, *numbers = sys.argv[1:]
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.decommission.enabled", "true")
    if what == "growing":
        allocation = {"enabled": "true", "shuffleTracking.enabled": "true", "initialExecutors": "1"}
        for name, value in allocation.items():
            builder = builder.config(f"spark.dynamicAllocation.{name}", value)
        builder = builder.config("spark.executor.cores", "1")
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    parts: dict[str, Any] = {
        "local": local,
        "steps": steps,
        "decommissioned": decommissioned,
        "growing": growing,
    }
    parts[what](*map(int, numbers))
    told("rows", spark.range(10).count())
    spark.stop()
