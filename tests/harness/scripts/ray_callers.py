"""Calls elastic.ray.run from where users of Ray call it: ``ray_callers.py WHERE[+WHERE] [ARGUMENT]``. Prints JSON.

The functions that train are made inside other ones, so that they are pickled by value as those of a user's script are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray

import elastic.ray
from elastic.errors import Invalid, JobFailed

Json = dict[str, Any]
ONE_EACH = {"CPU": 1.0}
remote: Any = ray.remote  # its types do not fit


def say(kind: str, what: object) -> None:
    print(kind, json.dumps(what), flush=True)


def meet() -> Callable[[Json], Json]:
    """Add the numbers of all workers, and return the place of each."""

    def train(config: Json) -> Json:
        import torch

        import elastic

        elastic.init()
        numbers = elastic.allgather(torch.tensor([config["number"]]), name="numbers")
        return {"rank": elastic.rank(), "numbers": numbers.tolist(), "pid": os.getpid()}

    return train


def stay() -> Callable[[], None]:
    """Train until killed."""

    def train() -> None:
        import elastic

        elastic.init()
        elastic.report({"pid": os.getpid()})
        signal.pause()

    return train


def show(report: elastic.ray.Report) -> None:
    say("report", {"rank": report.rank, **report.metrics})


def job(number: int, workers: int = 2) -> list[Json]:
    values: list[Json] = elastic.ray.run(
        meet(), {"number": number}, num_workers=workers, resources_per_worker=ONE_EACH
    ).values
    return values


def on_labels(_: str) -> None:
    """Train on labelled nodes; then ask for labels of no node, for invalid ones, and within a placement group."""

    def train() -> str:
        import elastic

        elastic.init()
        return os.environ["HOROVOD_HOSTNAME"]

    pool = {"pool": "training"}
    for hosts in (None, 1):
        with elastic.ray.Executor(2, num_hosts=hosts, label_selector=pool) as executor:
            executor.start()
            say("values", executor.run(train))
    for selector in ({"pool": "none"}, {"pool": "in("}):
        try:
            elastic.ray.run(train, num_workers=1, label_selector=selector, placement_timeout=3)
        except Invalid as error:
            say("refused", str(error))

    def in_group() -> str:
        try:
            elastic.ray.run(train, num_workers=1, label_selector=pool)
        except Invalid as error:
            return str(error)
        return ""

    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    where = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    task = remote(num_cpus=0)(in_group).options(scheduling_strategy=where)
    say("refused", ray.get(task.remote(), timeout=60))
    ray.util.remove_placement_group(group)


def from_tasks(_: str) -> None:
    """Call in a task and in an actor, concurrently."""

    class Caller:
        def call(self, number: int) -> list[Json]:
            return job(number, 1)

    task = remote(num_cpus=0)(job).remote(1, 1)
    caller = remote(num_cpus=0)(Caller).remote()
    say("values", ray.get([task, caller.call.remote(2)], timeout=100))


def by_client(url: str) -> None:
    for _ in range(3):
        # Ray gives the client's server 30 s to start, which may be too short on a busy machine.
        with contextlib.suppress(ConnectionAbortedError):
            ray.init(url)
            break
    say("values", job(3))
    try:
        elastic.ray.run(meet(), {}, num_workers=100, placement_timeout=5)
    except Invalid as error:
        say("refused", str(error))


def in_trials(results: str) -> None:
    """Two concurrent trials of Ray Tune, each with a bundle for itself and two for its workers."""
    from ray import tune

    def train(config: Json) -> None:
        import signal

        import torch

        import elastic

        elastic.init()
        told = {}
        for name, number in (("numbers", config["number"]), ("pids", os.getpid())):
            told[name] = elastic.allgather(torch.tensor([number]), name=name).tolist()
        if elastic.rank() == 0:
            elastic.report(told | config)
        if config["number"] == 5:
            signal.pause()

    def trial(config: Json) -> None:
        group: Any = ray.util.get_current_placement_group()
        more = {"group": group.id.hex()}
        elastic.ray.run(
            train, config, num_workers=2, on_report=lambda said: tune.report(said.metrics | more)
        )

    bundles = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    tuner = tune.Tuner(
        tune.with_resources(trial, bundles),
        param_space={"number": tune.grid_search([4, 5])},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        # Tune ends the endless one.
        run_config=tune.RunConfig(
            storage_path=results, verbose=0, stop=lambda _, told: told.get("number") == 5
        ),
    )
    results_of: Any = tuner.fit()
    for result in results_of:
        assert result.error is None, result.error
        say("trial", result.metrics)


def refused(_: str) -> None:
    """Try impossible calls, one after another."""
    lock = threading.Lock()

    def holds_a_lock() -> None:
        lock.acquire()

    def fails() -> None:
        raise LookupError("this is what the user did")

    for train, wanted in (
        (holds_a_lock, {"num_workers": 1}),
        (meet(), {"config": {}, "num_workers": 100, "placement_timeout": 2}),
        (fails, {"num_workers": 1}),
    ):
        try:
            elastic.ray.run(train, **wanted)
        except (Invalid, JobFailed) as error:
            say(type(error).__name__, str(error))


def until_ended(_: str) -> None:
    # The tests may run in the background of a shell, whose programs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    elastic.ray.run(stay(), num_workers=1, on_report=show)


def inside(_: str) -> None:
    """Every worker uses Ray; survivors of a dead node continue in the same process."""

    def train(folder: str) -> Json:
        import time

        import ray
        import torch

        import elastic

        elastic.init()
        ray.init(log_to_driver=False)
        double: Any = ray.remote(num_cpus=0)(lambda number: 2 * number)
        worlds: list[int] = []

        @elastic.run
        def loop(state: elastic.ObjectState) -> None:
            worlds.append(elastic.size())
            while not (elastic.size() == 1 and state.steps_alone >= 20):
                number = ray.get(double.remote(elastic.size()))
                elastic.allreduce(torch.tensor([float(number)]), name="number")
                state.steps_alone += elastic.size() == 1
                state.commit()
                if not state.steps_alone:
                    elastic.report({"worlds": worlds, "folder": folder})
                time.sleep(0.02)

        loop(elastic.ObjectState(steps_alone=0))
        return {"worlds": worlds, "pid": os.getpid()}

    result = elastic.ray.run(
        train,
        os.getcwd(),
        num_workers=2,
        min_workers=1,
        resources_per_worker={"CPU": 0, "there": 1},
        on_report=show,
    )
    say("values", result.values)


def detached(name: str) -> None:
    """Make steps until the file ``go`` exists; the values are the repetitions of each step."""

    def train(folder: str) -> Json:
        import time

        import torch

        import elastic

        elastic.init()
        state = elastic.ObjectState(step=0)
        entered = []

        @elastic.run
        def loop(state: elastic.ObjectState) -> None:
            entered.append(state.step)
            while True:
                gone = elastic.allreduce(
                    torch.tensor([float(os.path.exists(os.path.join(folder, "go")))]), name="go"
                )
                state.step += 1
                if state.step % 20 == 1:
                    elastic.report({"step": state.step})
                state.commit()
                if gone.item():
                    return
                time.sleep(0.01)

        loop(state)
        return {"rank": elastic.rank(), "entered": entered, "steps": state.step, "pid": os.getpid()}

    elastic.ray.run(train, os.getcwd(), num_workers=2, min_workers=2, on_report=show, detached=name)


def steered(name: str) -> None:
    """Run a detached job that is scaled down, scaled up and loses workers while it trains, through Ray."""

    def train() -> Json:
        import time

        import torch

        import elastic

        elastic.init()
        state = elastic.ObjectState(step=0)
        made = []

        @elastic.run
        def loop(state: elastic.ObjectState) -> None:
            gone = False
            while not gone:
                sizes = elastic.allreduce(torch.ones(1), name="go", op=elastic.Sum)
                gone = state.step > 2000 or (state.step > 60 and sizes.item() == 1)
                made.append(state.step)
                state.step += 1
                if state.step % 10 == 1:
                    elastic.report({"step": state.step})
                state.commit()
                time.sleep(0.01)

        loop(state)
        return {"made": made}

    wanted = [(3, 2), (2, 3), (3, 1)]  # number of requested workers in a world of this size

    def steer(report: Any) -> None:
        job = elastic.Job(name, ray=True)
        if wanted and report.size == wanted[0][0] and report.generation > 1:
            say("told", job.scale(wanted.pop(0)[1]))

    result = elastic.ray.run(
        train, num_workers=2, min_workers=1, max_workers=3, on_report=steer, detached=name
    )
    say("values", result.values)


def attached(name: str) -> None:
    try:
        elastic.ray.attach("a name that nobody has")
    except Invalid as error:
        say("refused", str(error))
    say("values", elastic.ray.attach(name, on_report=show).values)


if __name__ == "__main__":
    where = {
        "labels": on_labels,
        "tasks": from_tasks,
        "client": by_client,
        "trials": in_trials,
        "refused": refused,
        "until_ended": until_ended,
        "inside": inside,
        "detached": detached,
        "attached": attached,
        "steered": steered,
    }
    for name in sys.argv[1].split("+"):
        where[name](sys.argv[2] if len(sys.argv) > 2 else "")
