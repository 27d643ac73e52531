"""A script for Horovod that catches and raises the exceptions of its users. Its weight is its step.

Commits after every fourth step. ``SCENES`` says what happens before a step, once per process: ``2:die=2`` slot 2 dies;
``6:updated=1`` slot 1 raises HostsUpdatedInterrupt; ``6:internal=0`` HorovodInternalError; ``5:full=3`` commit until
the world has three members; ``7:swallow=any`` what the collective raises is caught and passed over.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import horovod.torch as hvd
from horovod.common.elastic import notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

SLOT, START = map(int, os.environ["ELASTIC_WORKER"].rpartition(":")[2].split("#"))
STEPS = int(os.environ.get("STEPS", "16"))
SCENES: dict[int, list[tuple[str, str]]] = {}
for scene in os.environ.get("SCENES", "").split():
    step, _, what = scene.partition(":")
    kind, _, whom = what.partition("=")
    SCENES.setdefault(int(step), []).append((kind, whom))


def say(*words: Any) -> None:
    print("said", f"slot={SLOT}", *words, flush=True)


class Listener:
    def on_hosts_updated(self, timestamp: float, update_result: int) -> None:
        say("told", int(update_result), timestamp > 1e9)


def act(kind: str, whom: str, state: hvd.elastic.TorchState) -> None:
    mine = whom in ("any", str(SLOT))
    if kind == "die" and mine and START == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "updated" and mine:
        raise HostsUpdatedInterrupt()
    elif kind == "internal" and mine:
        raise HorovodInternalError("the script has had enough of this world")
    elif kind == "full":
        while hvd.size() < int(whom):
            time.sleep(0.01)
            state.commit()


def one_step(state: hvd.elastic.TorchState) -> None:
    swallows = False
    for kind, whom in SCENES.pop(state.step, []):
        swallows = swallows or kind == "swallow"
        act(kind, whom, state)
    try:
        mean = hvd.allreduce(torch.ones(1), name="one")
    except Exception as error:
        if not swallows:
            raise
        say("swallowed", type(error).__name__)
        mean = torch.zeros(1)
    with torch.no_grad():
        state.model.weight += mean
    state.step += 1


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> str:
    say("enters", state.step, state.model.weight.item(), hvd.size())
    try:
        while state.step < STEPS:
            one_step(state)
            if state.step % 4 == 0:
                state.commit()
    except HostsUpdatedInterrupt as change:
        say("changes", state.step, change.skip_sync)
        raise
    except HorovodInternalError as error:
        say("caught", state.step, isinstance(error, RuntimeError))
        raise
    return "trained"


hvd.init()
notification_manager.init()
notification_manager.register_listener(Listener())
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
outcome = train(hvd.elastic.TorchState(model=model, step=0))
say("ends", outcome, model.weight.item(), hvd.size())
