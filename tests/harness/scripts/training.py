"""Trains a small model equally in any world: the batch of a step is fixed, and divided between the ranks.

What happens it appends to ``history/<worker>.jsonl``, which `harness.history` reads. What it is to suffer comes from
the environment, as rules like ``slot=0,step=7,place=forward;...``. A rule means the first worker of its slot, or
``start=2`` the second, or ``start=any``; without a slot, every worker; ``size=1`` or ``generation=2``, only in such a
world.

DIE      SIGKILL at the place.
RAISE    an exception at the place: ``error=`` value, horovod, shape, late; or exit: ``sys.exit(3)``, and the end of the
         interpreter takes until a file ``exit`` exists.
WAIT     stop at the place until a file exists: ``file=``; ``then=collective`` takes part in one afterwards.
HOLD     ``4:size=3;9:file=go``: at that step go on committing, without a step, until the world has this size, or a file
         exists.
ENDS     a file, and no number of steps, ends the training. PACE: seconds of rest after each step.
SHARDED  the parameters are sharded by FSDP2; if ``zero``, the optimizer is a ZeroRedundancyOptimizer.
NO_ROOM  the GPU has no memory for a second copy of the state.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import problem  # type: ignore[import-not-found]
import torch
from torch import distributed

import elastic
from elastic.errors import HorovodInternalError
from elastic.runtime import lifecycle

DEADLINE_S = 60.0
WORKER = os.environ["ELASTIC_WORKER"]
HOST = WORKER.rpartition(":")[0]
DEVICE = os.environ.get("DEVICE", "cpu")  # each worker's own GPU if it is cuda
if "FAKE_GPUS" in os.environ:
    os.environ.setdefault("FAKE_HOST", HOST)  # its own GPUs
SLOT, START = map(int, WORKER.rpartition(":")[2].split("#"))
STEPS = int(os.environ.get("STEPS", "10"))
SHARDED = "SHARDED" in os.environ
ZERO = os.environ.get("SHARDED") == "zero"
NEVER = -1


def rules(name: str) -> list[dict[str, str]]:
    text = os.environ.get(name, "")
    return [dict(pair.split("=") for pair in rule.split(",")) for rule in text.split(";") if rule]


RULES = {name: rules(name) for name in ("DIE", "RAISE", "WAIT")}


def at(place: str, step: int) -> None:
    """A place where this worker may have to wait, to raise, or to die."""
    for rule in RULES["WAIT"]:
        if meant(rule, place, step):
            Path(f"waits.{place}.{SLOT}".replace(" ", "_")).touch()
            until_exists(rule["file"])
            if rule.get("then") == "collective":  # which raises if the world has broken meanwhile
                elastic.allreduce(torch.ones(1), name="then")
    for rule in RULES["DIE"]:
        if meant(rule, place, step):
            os.kill(os.getpid(), signal.SIGKILL)
    for rule in RULES["RAISE"]:
        if meant(rule, place, step):
            match rule["error"]:
                case "value":
                    raise ValueError("this sample is damaged")
                case "horovod":
                    raise HorovodInternalError("the script has had enough of this world")
                case "exit":
                    atexit.register(until_exists, "exit")
                    sys.exit(3)
                case "shape":
                    elastic.allgather(torch.ones(1, 1 + elastic.rank()), name="unequal")
                case "late":
                    ragged = torch.ones(1, 1 + elastic.rank())
                    handle = elastic.allgather_async(ragged, name="unequal")
                    while elastic.rank() == 0 and not lifecycle.current().broken:
                        time.sleep(0.001)  # until the other has failed, and the world with it
                    elastic.synchronize(handle)


def meant(rule: dict[str, str], place: str, step: int) -> bool:
    asked = {"start": "1"} | rule
    mine = {"place": place, "slot": SLOT, "host": HOST, "step": step, "start": START}
    if rule["place"] == place and lifecycle.active() is not None:
        mine |= {"size": elastic.size(), "generation": lifecycle.current().generation}
    return all(key not in asked or asked[key] in (str(mine[key]), "any") for key in mine)


def until_exists(name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not Path(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {name}")
        time.sleep(0.002)


def record(what: str, **fields: Any) -> None:
    rt = lifecycle.current()
    fields |= {"what": what, "generation": rt.generation, "at": time.monotonic()}
    fields |= {"worker": WORKER, "rank": rt.place.rank, "size": rt.place.size, "pid": os.getpid()}
    log = os.open(f"history/{WORKER}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(log, json.dumps(fields).encode() + b"\n")
    os.close(log)


class State(elastic.TorchState):
    """Reports its saves. A save inside ``commit`` is a place to die, before and after."""

    committing = False

    def commit(self) -> None:
        self.committing = True
        try:
            super().commit()
        finally:
            self.committing = False

    def save(self) -> None:
        if self.committing:
            at("commit", self.step)
        super().save()
        record("save", step=self.step)
        if self.committing:
            at("saved", self.step)

    def restore(self) -> None:
        at("restore", self.step)
        super().restore()


class ShardedState(elastic.TorchState):
    """Like `State`, without a save of its own, which a sharded state refuses."""

    def commit(self) -> None:
        at("commit", self.step)
        super().commit()

    def report_commit(self) -> None:  # the commit is sealed
        super().report_commit()
        record("save", step=self.step)
        at("saved", self.step)


def gathered(tensor: Any) -> torch.Tensor:
    """On the CPU, from all ranks where it is sharded."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu()


def position(model: Any) -> int:
    """Return the index of this rank's gradients in their sum, which follows the shards if there are any."""
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    return int(elastic.rank() if mesh is None else mesh.get_local_rank())


def shard(model: Any) -> None:
    """Gradients are summed up, as `elastic.Sum` does."""
    from torch.distributed.fsdp import fully_shard

    for module in (model[0], model[2], model):
        fully_shard(module).set_gradient_divide_factor(1.0)


def divided(model: Any, like: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options = {name: value for name, value in like.param_groups[0].items() if name != "params"}
    return ZeroRedundancyOptimizer(model.parameters(), type(like), **options)


def digest(state: elastic.TorchState) -> str:
    """Of everything that must be equal: parameters, the optimizer's state and options, the Python values. Collective
    where the parameters are sharded.
    """
    whole = hashlib.sha256(f"{state.step} {state.seen}".encode())
    for tensor in state.model.state_dict().values():
        whole.update(gathered(tensor).numpy().tobytes())
    if ZERO:  # whose entries are on different ranks
        return whole.hexdigest()
    kept = state.optimizer.state_dict()
    for entries in kept["state"].values():
        for name, value in sorted(entries.items()):
            content = (
                gathered(value).numpy().tobytes() if isinstance(value, torch.Tensor) else str(value)
            )
            whole.update(name.encode())
            whole.update(content if isinstance(content, bytes) else content.encode())
    for group in kept["param_groups"]:
        whole.update(repr(sorted(group.items())).encode())
    return whole.hexdigest()


def holding(step: int) -> bool:
    """Return the same on all ranks: they compare their values."""
    for rule in os.environ.get("HOLD", "").split(";"):
        place, _, wish = rule.partition(":")
        if not rule or int(place) != step:
            continue
        kind, _, value = wish.partition("=")
        if kind == "size" and elastic.size() == int(value):
            continue
        met = torch.tensor([float(kind == "file" and Path(value).exists())])
        if not elastic.allreduce(met, op=elastic.Sum, name="met").item():
            return True
    return False


def ended(state: elastic.TorchState) -> bool:
    """Return the same on all ranks: the first one checks, all receive."""
    if "ENDS" not in os.environ:
        return bool(state.step >= STEPS)
    found = torch.tensor([float(elastic.rank() == 0 and Path(os.environ["ENDS"]).exists())])
    return bool(elastic.allreduce(found, op=elastic.Max, name="ends").item())


def one_step(state: elastic.TorchState) -> float:
    model, optimizer = state.model, state.optimizer
    inputs, wanted = (each.to(DEVICE) for each in problem.batch(state.step))
    rank, size = elastic.rank(), elastic.size()
    match os.environ.get("ZERO_GRAD"):
        case "zeros":
            optimizer.zero_grad(set_to_none=False)
        case "model":
            model.zero_grad()
        case _:
            optimizer.zero_grad()
    difference = model(inputs[rank::size]) - wanted[rank::size]
    loss = difference.square().sum() / problem.SAMPLES
    loss.backward()
    if ZERO:
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
    optimizer.step()
    problem.change_options(state.step, optimizer)
    if SHARDED:  # without a collective that would fail instead of the step's own
        return float(loss.detach())
    return float(elastic.allreduce(loss.detach(), op=elastic.Sum, name="loss"))


def careless_step(state: elastic.TorchState) -> float:
    """Catch all errors, as in scripts that expect only their own."""
    try:
        return one_step(state)
    except Exception as error:
        record("swallowed", error=repr(error))
        raise


def greet() -> None:
    """Call several collectives before ``elastic.run``."""
    for name in ("hello", "again"):
        total = elastic.allreduce(torch.ones(1), op=elastic.Sum, name=name)
        record("greeted", total=float(total), name=name)


least: list[dict[str, int]] = []  # resources in the first worlds


def resources() -> dict[str, int]:
    """Open descriptors and threads, and what it has on a made-up GPU, once those of the last world are gone: their end
    is not waited for.
    """
    deadline = time.monotonic() + (10 if len(least) >= 3 else 1)
    while True:
        counts = {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        if "FAKE_GPUS" in os.environ:
            import fake_cuda  # type: ignore[import-not-found]

            counts |= fake_cuda.held()
        if any(all(counts[name] <= each[name] for name in counts) for each in least):
            return counts
        if time.monotonic() > deadline:
            least.append(counts)
            return counts
        time.sleep(0.02)


def main() -> None:
    Path("history").mkdir(exist_ok=True)
    at("before init", NEVER)
    elastic.init()
    if "GREET" in os.environ:
        greet()
    own_weights, wider = "OWN_WEIGHTS" in os.environ, WORKER in os.environ.get("WIDER", "").split()
    if DEVICE == "cuda":
        torch.cuda.set_device(elastic.local_rank() % torch.cuda.device_count())
    model = problem.model(SLOT if own_weights else 0, 9 if wider else 8).to(DEVICE)
    if SHARDED:
        distributed.init_process_group()
    if SHARDED and not ZERO:
        shard(model)
    if "NO_ROOM" in os.environ:
        setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))  # noqa: B010 - typed otherwise
    descent = problem.optimizer(os.environ.get("OPTIMIZER", "SGD"), model)
    if ZERO:
        descent = divided(model, descent)
    optimizer = (
        descent
        if SHARDED
        else elastic.DistributedOptimizer(
            descent, named_parameters=model.named_parameters(), op=elastic.Sum
        )
    )
    # `seen` grows in place: a commit must copy it.
    state = (ShardedState if SHARDED else State)(model=model, optimizer=optimizer, step=0, seen=[])
    state.register_reset_callbacks([lambda: at("reset", state.step)])
    model[0].register_forward_hook(lambda *_: at("forward", state.step))
    if not SHARDED:
        list(model.parameters())[1].register_hook(lambda _: at("backward", state.step))
    optimizer.register_step_post_hook(lambda *_: at("optimizer", state.step))
    at("before run", NEVER)
    step = careless_step if "CARELESS" in os.environ else one_step

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        used = resources() if "COUNT" in os.environ else {}
        if SHARDED:  # the commit that this world has restored, or the initial one
            record("save", step=state.step)
        place = position(state.model)
        record("enter", step=state.step, sha=digest(state), position=place, **used)
        print(f"slot {SLOT} enters", flush=True)
        assert state.seen == list(range(state.step)), state.seen
        at("enter", state.step)
        while not ended(state):
            if holding(state.step):
                time.sleep(0.01)
                state.commit()
                continue
            loss = step(state)
            record("step", step=state.step, loss=loss)
            state.seen.append(state.step)
            state.step += 1
            at("stepped", state.step)
            state.commit()
            time.sleep(float(os.environ.get("PACE", "0")))
        at("end", state.step)

    train(state)
    flat = torch.cat([gathered(p).reshape(-1) for p in model.parameters()])
    sha = digest(state)
    if SHARDED:  # no rank may exit, and free its memory, while the kernel of another still reads it
        elastic.allreduce(torch.ones(1), name="gathered")
    record("done", step=state.step, sha=sha, parameters=flat.tolist())


if __name__ == "__main__":
    main()
