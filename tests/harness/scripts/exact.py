"""Trains three small models in shards under the faults in EVENTS; reports the digests of each commit.

The models are those that go wrong most easily: an MLP with momentum; a convnet with BatchNorm, dropout and
augmentation; a GPT with dropout, AdamW, a learning rate schedule and clipping. Each step trains all.

EVENTS   ``7:kill:1:backward 9:hold:3 12:leave:0``: at this step the worker with this rank, modulo the size of the
         world, is killed after the backward pass of its first shard, asked to leave, or frozen; or all wait until the
         world has this size. ``all`` kills every worker. Each happens once, whatever is done again. Who is asked to
         leave does not come back.
THREADS  of workers that are started again; step 4 then waits for a file ``go`` where nobody is to hold.
HOLD_S   how long to wait for that, in seconds.
VERIFY   share of the shards that two workers compute; ``7:kill:1:second`` kills a worker in such a second pass.
OPERATOR=1  a failpoint ``operator`` at the last product of the MLP, whose action may be ``flip=product:SEED``.
SLOW     ``2:5``: seconds, in hundredths, that rank 2 sleeps in each shard, and the others a hundredth.
STEPS, SHARDS, EXACT=0, PLANT (a bug, see `planted`), OWN_DIGESTS (a file for them, where there is no driver).
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import numpy
import torch
import torch.nn.functional as F
from torch import nn

import elastic
from elastic import failpoints
from elastic.failpoints import actions

SEED = 5
STEPS, SHARDS = int(os.environ.get("STEPS", "12")), int(os.environ.get("SHARDS", "8"))
SLOW = os.environ["SLOW"].split(":") if "SLOW" in os.environ else []
PLANT = os.environ.get("PLANT", "").split(",")
DEADLINE_S = float(os.environ.get("HOLD_S", "60"))
WIDTH, CONTEXT, WORDS = 16, 8, 31


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 16, 5)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        found = F.max_pool2d(self.norm(self.first(pictures)).relu(), 2)
        output: torch.Tensor = self.last(F.dropout(found.flatten(1), 0.2, self.training))
        return output


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words) + self.places.weight
        output: torch.Tensor = self.block(found, src_mask=self.mask) @ self.words.weight.T
        return output


def batch(step: int, shard: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a shard: numbers, pictures, labels, words."""
    drawn = torch.Generator().manual_seed(1000 * step + shard)
    return (
        torch.randn(6, WIDTH, generator=drawn),
        torch.randn(6, 1, 8, 8, generator=drawn),
        torch.randint(5, (6,), generator=drawn),
        torch.randint(WORDS, (3, CONTEXT + 1), generator=drawn),
    )


def losses_of(models: nn.ModuleDict, step: int, shard: int) -> list[torch.Tensor]:
    numbers, pictures, labels, words = batch(step, shard)
    if numpy.random.random() < 0.5:  # augmentation
        pictures = pictures.flip(-1)
    return [
        models["mlp"](numbers).square().mean(),
        F.cross_entropy(models["convnet"](pictures), labels),
        F.cross_entropy(models["gpt"](words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()),
    ]


# ---- faults ------------------------------------------------------------------------------------------------------


def events_at(step: int) -> list[list[str]]:
    events = [word.split(":") for word in os.environ.get("EVENTS", "").split()]
    return [rest for at, *rest in events if int(at) == step]


def once(name: str) -> bool:
    """Return whether this worker is the first to call it."""
    try:
        os.close(os.open(f"event.{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for(name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not Path(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {name}")
        time.sleep(0.005)


def suffer(step: int, place: str) -> None:
    for number, (kind, who, *where) in enumerate(events_at(step)):
        if kind == "hold" or (where or ["backward"])[0] != place:
            continue
        rank = elastic.rank()
        if kind == "all":
            mine = once(f"{step}.{number}.{rank}")
        else:
            mine = int(who) % elastic.size() == rank and once(f"{step}.{number}")
        if mine:
            sent = {"leave": signal.SIGTERM, "freeze": signal.SIGSTOP}
            os.kill(os.getpid(), sent.get(kind, signal.SIGKILL))


def hold(state: Any) -> None:
    for number, (kind, size, *_) in enumerate(events_at(state.shards.step)):
        passed = Path(f"event.hold.{state.shards.step}.{number}")
        deadline = time.monotonic() + DEADLINE_S
        while kind == "hold" and elastic.size() != int(size) and not passed.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the world never had {size} workers")
            time.sleep(0.005)
            state.check_host_updates()
        if kind == "hold":
            passed.touch()  # repeated steps do not wait again


# ---- bugs that the digests must show -----------------------------------------------------------------------------


def planted(state: Any, step: int) -> None:
    """Errors of this process, at step 3."""
    if step != 3:
        return
    if "buffer" in PLANT and elastic.rank() == 0:
        state.models["convnet"].norm.running_mean.add_(1e-3)
    if "ulp" in PLANT and elastic.rank() == 1:

        def add(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient.view(torch.int32).add_(1)  # a single one may be lost when shards are summed
            return gradient

        state.models["gpt"].places.weight.register_hook(add)
    if "seed" in PLANT:
        from elastic.exact import random_generators

        honest, rank = random_generators.set_seed, elastic.rank()
        random_generators.set_seed = lambda seed: honest(seed + rank)
    if "position" in PLANT:
        data = globals()["batch"]
        globals()["batch"] = lambda step, shard: data(step, shard + elastic.rank())
    if "threads" in PLANT and elastic.rank() == 1:
        torch.set_num_threads(2)
    for name, change in (("order", in_the_order_of_ranks), ("partial", without_a_partial)):
        for reducer in state.shards._all() if name in PLANT else ():
            if hasattr(reducer, "_program"):
                spoil_sums(reducer, change)


def spoil_sums(reducer: Any, change: Any) -> None:
    begins = reducer.step_begins

    def spoilt(step: Any) -> None:
        begins(step)
        reducer._program = change(reducer._program)

    reducer.step_begins = spoilt


def in_the_order_of_ranks(program: Any) -> Any:
    first, *others = sorted(each for each in program if each is not None)
    return (first, *(each for load in others for each in (load, None)))


def without_a_partial(program: Any) -> Any:
    last = max(number for number, each in enumerate(program) if each is not None)
    return (*program[:last], *program[last + 2 :])  # nor its addition


class Passed(torch.autograd.Function):
    """The values of another tensor, and the gradient of the first one."""

    @staticmethod
    def forward(_: Any, output: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        return changed

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def may_flip(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Let a failpoint flip one of the upper bits of a product."""
    changed = output.detach().clone()

    def flip(seed: int) -> str:
        bits = changed.view(-1).view(torch.int32)
        place = seed % bits.numel()
        bits[place] ^= 1 << (16 + seed % 15)
        return f"a bit of value {place} of a product"

    actions.flippers["product"] = flip
    failpoints.failpoint("operator")
    found: torch.Tensor = Passed.apply(output, changed)
    return found


# ---- training ----------------------------------------------------------------------------------------------------


@elastic.run
def train(state: Any) -> None:
    models, shards = state.models, state.shards
    while shards.step < STEPS:
        # Here, because commit() does not return if the world changes.
        suffer(shards.step - 1, "commit")
        hold(state)
        step = shards.step
        if step == 4 and "THREADS" in os.environ and "hold" not in os.environ["EVENTS"]:
            wait_for("go")
        if state.losses and len(state.losses) != step:
            raise AssertionError(f"step {step} follows {len(state.losses)} losses")
        planted(state, step)
        found = []
        failpoints.set_step(step)
        for shard in shards:
            suffer(step, "forward")
            if shards.verifying:
                suffer(step, "second")
            if SLOW:
                time.sleep(0.01 * (int(SLOW[1]) if elastic.rank() == int(SLOW[0]) else 1))
            losses = losses_of(models, step, shard)
            torch.stack(losses).sum().backward()
            suffer(step, "backward")
            found.append(torch.stack(losses).sum().detach())
        if not found:  # a spare worker
            suffer(step, "forward")
            suffer(step, "backward")
        nn.utils.clip_grad_norm_(models["gpt"].parameters(), 1.0)
        suffer(step, "optimizer")
        state.sgd.step()
        state.adamw.step()
        state.schedule.step()
        state.losses.append(shards.mean(found))
        state.commit()
        own(state)
    final = {name: value.tolist() for name, value in models.state_dict().items()}
    if elastic.rank() == 0:
        Path("final.json").write_text(json.dumps([state.losses, final]))


def own(state: Any) -> None:
    if "OWN_DIGESTS" in os.environ:
        with open(os.environ["OWN_DIGESTS"], "a") as file:
            file.write(json.dumps([state.shards.step, state.digest_tensors()]) + "\n")


def main() -> None:
    elastic.init()
    if "THREADS" in os.environ and not os.environ["ELASTIC_WORKER"].endswith("#1"):
        torch.set_num_threads(int(os.environ["THREADS"]))  # of later workers
    torch.manual_seed(3)  # initial weights of newcomers, until they receive the others'
    models = nn.ModuleDict(
        {
            "mlp": nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, 4)),
            "convnet": Convnet(),
            "gpt": GPT(),
        }
    )
    if "OPERATOR" in os.environ:
        models.get_submodule("mlp.2").register_forward_hook(may_flip)
    shards = elastic.Shards(
        SHARDS,
        seed=SEED,
        exact=os.environ.get("EXACT", "1") == "1",
        verify=float(os.environ.get("VERIFY", "0")),
    )
    sgd = torch.optim.SGD(
        [*models["mlp"].parameters(), *models["convnet"].parameters()], lr=0.05, momentum=0.9
    )
    adamw = torch.optim.AdamW(models["gpt"].parameters(), lr=0.01)
    names = list(models.named_parameters())
    sgd = elastic.DistributedOptimizer(sgd, names, shards=shards)
    adamw = elastic.DistributedOptimizer(adamw, names, shards=shards)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0 / (1 + step))
    elastic.broadcast_parameters(models.state_dict(), root_rank=0)
    state = elastic.TorchState(
        models=models, sgd=sgd, adamw=adamw, schedule=schedule, shards=shards, losses=[]
    )
    train(state)


main()
