"""Every public method of horovod.ray on a real cluster, one part of them at a time. Prints lines of JSON.

Functions and classes of this file are pickled by value, as those of any script that is run are.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.ray import BaseHorovodWorker, ElasticRayExecutor, RayExecutor, RayHostDiscovery


def say(kind: str, what: object) -> None:
    print(kind, json.dumps(what), flush=True)


class Trainer:
    def __init__(self, start: int, by: int = 0) -> None:
        self.value = start + by

    def train(self) -> dict:
        """Call init() and a collective in every call."""
        import torch

        import horovod.torch as hvd
        from horovod.ray import ray_logger

        hvd.init()
        self.value += 1
        if "ELASTIC_DRIVER" in os.environ:  # one of our jobs, and not of Ray Train
            ray_logger.log({"rank": hvd.rank(), "value": self.value})
        total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()
        return {"rank": hvd.rank(), "size": hvd.size(), "value": self.value, "sum": total}


def place(shut_down: bool = False) -> list:
    import horovod.torch as hvd

    hvd.init()
    found = [hvd.rank(), hvd.size(), hvd.cross_size(), os.environ.get("MARK")]
    if shut_down:
        hvd.shutdown()
    return found


def fail_on(rank: int) -> None:
    """The other ranks wait in a collective for the failing one."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == rank:
        raise KeyError(f"rank {rank} has lost its data")
    hvd.allreduce(torch.ones(1))


def error_of(call, *arguments) -> list[str]:
    try:
        call(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error), str(error.__cause__ or "")]
    return []


def in_group() -> list:
    """The caller has no CPU: every bundle of its group is for a worker."""
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=20), num_workers=2)
    free = sum(RayHostDiscovery().find_available_hosts_and_slots().values())
    executor.start()
    found = executor.run(place)
    executor.shutdown()
    return [free, [each[:2] for each in found]]


def static() -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=60)
    executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=1)
    executor.start(Trainer, [5], {"by": 2}, {"MARK": 7})
    say("free", sum(RayHostDiscovery().find_available_hosts_and_slots().values()))
    heard: list[dict] = []
    say("execute", executor.execute(Trainer.train, callbacks=[heard.append]))
    say("execute", executor.execute(lambda trainer: trainer.train()))
    say("heard", sorted(heard, key=lambda each: each["rank"]))
    say("single", executor.execute_single(lambda trainer: trainer.value))
    say("run", executor.run(place, kwargs={"shut_down": True}))
    say("run", executor.run(place))
    say("remote", ray.get(executor.run_remote(lambda a, b: [a, b], [1], {"b": 2})))
    say("raised", error_of(executor.run, fail_on, [1]))
    say("again", executor.execute(Trainer.train))
    say("exit", error_of(executor.run, sys.exit, [3]))
    say("object", error_of(executor.execute, lambda trainer: trainer.nothing))
    say("again", executor.run(place))
    say("died", error_of(executor.run, os._exit, [9]))
    say("after", error_of(executor.run, place))
    executor.shutdown()
    executor.shutdown()
    say("free", sum(RayHostDiscovery().find_available_hosts_and_slots().values()))
    too_many = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_hosts=3)
    say("no", error_of(too_many.start))
    too_many.shutdown()
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    call = ray.remote(in_group).options(num_cpus=0, scheduling_strategy=inside)
    say("group", ray.get(call.remote()))
    ray.util.remove_placement_group(group)
    actor: Any = ray.remote(num_cpus=0)(BaseHorovodWorker).remote(world_rank=1, world_size=2)
    ray.get(actor.update_env_vars.remote({"A": 1, "B": None}))
    ray.get(actor.start_executable.remote(Trainer, [1], {"by": 1}))
    environ: Any = ray.get(actor.env_vars.remote())
    node = ray.get(actor.node_id.remote())
    say(
        "worker",
        {
            "environ": [environ.get(n) for n in ("A", "B", "HOROVOD_RANK", "HOROVOD_SIZE")],
            "known": node in [each["NodeID"] for each in ray.nodes()],
            "gpus": ray.get(actor.get_gpu_ids.remote()),
            "host": bool(ray.get(actor.hostname.remote())),
            "value": ray.get(actor.execute.remote(lambda trainer: trainer.value)),
        },
    )


def free() -> None:
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=1)  # all free resources
    executor.start(Trainer, [5], None, {"MARK": 7})
    say("single", executor.execute_single(lambda trainer: [trainer.value, *place()]))
    executor.shutdown()


def elastic() -> None:
    warnings.simplefilter("ignore")
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2)
    old = ElasticRayExecutor(settings, env_vars={"MARK": "8"})
    old.start()
    heard: list[dict] = []
    say("run", old.run(lambda: [Trainer(5).train(), place()], callbacks=[heard.append]))
    say("heard", sorted(heard, key=lambda each: each["rank"]))
    old.shutdown()


def trainer() -> None:
    """Ray Train's integration, of its first version."""
    from ray import train
    from ray.train.horovod import HorovodTrainer

    def loop() -> None:
        train.report(Trainer(5).train())

    folder = train.RunConfig(storage_path=sys.argv[2], verbose=0)
    scaling = train.ScalingConfig(num_workers=2, trainer_resources={"CPU": 0})
    found: Any = HorovodTrainer(loop, scaling_config=scaling, run_config=folder).fit()
    say("trainer", {name: found.metrics[name] for name in ("rank", "size", "value", "sum")})


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    parts = {"static": static, "free": free, "elastic": elastic, "trainer": trainer}
    parts[sys.argv[1]]()
