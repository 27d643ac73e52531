"""Records of the workers of ``scripts/training.py``, and their invariants under any faults."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.job import Job

SCRIPTS = Path(__file__).parent / "scripts"
TRAINING = ["python", SCRIPTS / "training.py"]
STAY_AWAY = "--blacklist-cooldown-range 60 60"  # the slots of dead workers stay empty
RETURN = "--blacklist-cooldown-range 0.1 1"
Json = dict[str, Any]


def started(job: Callable[..., Job], np: int, flags: str = STAY_AWAY, **env: str) -> Job:
    """Start a job of ``scripts/training.py``, which continues with any number of workers."""
    return job(f"-np {np} --min-np 1 {flags}", TRAINING, env={"ELASTIC_DIGESTS": "1"} | env)


def sizes(job: Job) -> list[int]:
    """Number of worlds so far. The first one is that of ``init()``, the second that of ``elastic.run``."""
    return [len(world["members"]) for world in job.worlds()]


def pid_of(job: Job, slot: int, host: str = "localhost") -> int:
    """Return the newest connected worker of a slot."""
    pids = {tuple(e["worker"][:2]): int(e["pid"]) for e in job.events("WorkerConnected")}
    return pids[host, slot]


def kill_slot(job: Job, slot: int) -> None:
    os.kill(pid_of(job, slot), signal.SIGKILL)


class History:
    """The records of a job, each worker's in its order."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.by_worker: dict[str, list[Json]] = {}
        for path in sorted((job.folder / "history").glob("*.jsonl")):
            whole, _, _ = path.read_text().rpartition("\n")
            self.by_worker[path.stem] = [json.loads(line) for line in whole.splitlines()]

    def has(self, worker: str, what: str, **fields: Any) -> bool:
        """Return whether a worker, ``host:slot#start``, has written such a record."""
        wanted = fields | {"what": what}
        return any(wanted.items() <= r.items() for r in self.by_worker.get(worker, []))

    def all(self, what: str) -> list[Json]:
        return [r for records in self.by_worker.values() for r in records if r["what"] == what]

    def enters(self) -> dict[int, list[Json]]:
        """Return the workers that entered the training function in each generation."""
        entered: dict[int, list[Json]] = {}
        for record in self.all("enter"):
            entered.setdefault(record["generation"], []).append(record)
        return dict(sorted(entered.items()))

    def losses(self) -> list[float]:
        """Return the committed history by step: a repeated step counts as in its last run."""
        last: dict[int, Json] = {}
        for record in sorted(self.all("step"), key=lambda r: r["generation"]):
            before = last.get(record["step"])
            if before is not None and before["generation"] == record["generation"]:
                assert before["loss"] == record["loss"], (before, record)
            last[record["step"]] = record
        assert sorted(last) == list(range(len(last))), sorted(last)
        return [last[step]["loss"] for step in sorted(last)]

    def check(self, *, steps: int | None = 10, optimizer: str = "SGD") -> None:
        """Check that no commit was lost, all were equal, and training had the undisturbed results."""
        self.check_commits_kept()
        self.check_equal()
        if steps is not None:
            self.check_undisturbed(steps, optimizer)

    def check_commits_kept(self, unsealed: int = 0) -> None:
        """Check that every world begins at the newest step that one of its members has saved.

        ``unsealed``: how many newer commits may be lost, which no other rank may have known to be complete.
        """
        for generation, entered in self.enters().items():
            saved = []
            for enter in entered:
                own = self.by_worker[enter["worker"]]
                before = own[: own.index(enter)]
                saved += [r["step"] for r in before if r["what"] == "save"][-1:]
            begins = {enter["step"] for enter in entered}
            assert len(begins) == 1, f"generation {generation} begins at several steps: {entered}"
            kept = range(max(saved) - unsealed, max(saved) + 1)
            assert begins <= {*kept}, f"generation {generation}: {begins}, saved {saved}"

    def check_equal(self) -> None:
        """Check that parameters agree bit for bit in the driver's messages and in the workers' files."""
        self.check_digests()
        self.check_written()

    def check_digests(self) -> None:
        digests: dict[tuple[int, ...], set[int]] = {}
        for event in self.job.events("WorkerDigested"):
            digests.setdefault(tuple(event["commit"]), set()).add(event["digest"])
        assert digests, "no worker reported a digest; run with ELASTIC_DIGESTS=1"
        unequal = {commit: each for commit, each in digests.items() if len(each) > 1}
        assert not unequal, unequal
        assert "its parameters differ" not in self.job.output

    def check_written(self) -> None:
        for what in ("enter", "done"):
            by_place: dict[tuple[int, int], set[str]] = {}
            for record in self.all(what):
                key = (record["generation"], record["step"])
                by_place.setdefault(key, set()).add(record["sha"])
            assert all(len(shas) == 1 for shas in by_place.values()), (what, by_place)

    def check_undisturbed(self, steps: int, optimizer: str = "SGD") -> None:
        """Check that losses and final weights are those of an undisturbed single process."""
        losses, parameters = undisturbed(steps, optimizer)
        torch.testing.assert_close(
            torch.tensor(self.losses()), torch.tensor(losses), rtol=1e-4, atol=1e-5
        )
        done = self.all("done")
        assert done, "no worker came to the end"
        for record in done:
            torch.testing.assert_close(
                torch.tensor(record["parameters"]), parameters, rtol=1e-4, atol=1e-5
            )


@functools.cache
def undisturbed(steps: int, optimizer: str = "SGD") -> tuple[list[float], torch.Tensor]:
    """Return losses by step and final parameters, float32 [parameters], trained here without any of our code."""
    return trained_alone([(0,)] * steps, optimizer)


def trained_alone(
    orders: Sequence[Sequence[int]], optimizer: str
) -> tuple[list[float], torch.Tensor]:
    """The same with all ranks of each step, in the order in which their gradients are added."""
    problem = training_problem()
    model = problem.model()
    descent = problem.optimizer(optimizer, model)
    losses = []
    for step, order in enumerate(orders):
        inputs, wanted = problem.batch(step)
        sums: list[torch.Tensor] = []
        total = 0.0
        for rank in order:
            descent.zero_grad()
            own = slice(rank, None, len(order))
            difference = model(inputs[own]) - wanted[own]
            loss = difference.square().sum() / problem.SAMPLES
            loss.backward()
            total += float(loss.detach())
            gradients = [p.grad.clone() for p in model.parameters()]
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        descent.step()
        problem.change_options(step, descent)
        losses.append(total)
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def training_problem() -> ModuleType:
    spec = importlib.util.spec_from_file_location("problem", SCRIPTS / "problem.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
