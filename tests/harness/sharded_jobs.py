"""Real jobs with a sharded state, for tests of each kind of sharding: faults, and the results of all workers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import elastic
from elastic.driver.reasons import ReasonKind
from harness.history import SCRIPTS
from harness.job import Job

GONE = "--blacklist-cooldown-range 100 100"  # a killed worker does not return
BACK = "--blacklist-cooldown-range 0.01 0.02 --slot-attempts 50"
# Memory of a worker ends with it, as on different hosts.
APART: dict[str, Any] = {"ELASTIC_NATIVE": "0"}
PLACES = (
    "forward", "backward", "optimizer", "commit", "snapshot", "shard-copy", "shard-mirror", "shard-seal",
)  # fmt: skip
# Imports that the workers of a sharded job need besides torch, of the marker ``forked``: 2 s for each process.
IMPORTS = ("torch.distributed.fsdp", "torch.distributed.optim")
AGAIN = ("rendezvous", "state-copy", "shard-moved", "shard-placed")  # places of a recovery
STEPS = 10
sys.path.append(str(SCRIPTS))


@dataclass(frozen=True)
class ShardedScript:
    """A script that trains with one kind of sharding, in real jobs.

    Args:
        module: imported script, whose ``alone`` returns the losses of one process.
        least: smallest number of workers with which its jobs continue.
    """

    module: ModuleType
    least: int

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.module.__name__}.py"

    def trained(
        self,
        job: Any,
        rules: str,
        flags: str = GONE,
        steps: int = STEPS,
        workers: int = 4,
        **env: Any,
    ) -> list[dict[str, Any]]:
        """Return the final records of every worker."""
        training = job(
            f"-np {workers} --min-np {self.least} {flags}",
            ["python", self.path],
            env={"STEPS": str(steps), "WORKERS": str(workers), "ELASTIC_FAILPOINTS": rules} | env,
        )
        training.succeed(250 + 4 * steps)  # of which each tenth may wait for a worker to start
        return results(training)

    def check(
        self, found: list[dict[str, Any]], steps: int = STEPS, feature: str = "plain"
    ) -> None:
        """As one process that nothing happened to, with the objects that each worker began with."""
        assert len({each["digest"] for each in found}) == 1, "ranks have different parameters"
        rel = 0.05 if feature == "bf16" else 1e-5
        wanted = self.module.alone(steps, feature)
        for each in found:
            assert each["same"], "a parameter, the model or the optimizer was replaced"
            assert each["counted"] == steps, "a buffer is of another commit"
            assert len(each["sizes"]) == steps
            assert each["losses"] == pytest.approx(wanted, rel=rel)
            if "entries" in each and len(found) > 1:
                assert each["entries"] < each["entries_of_all"], "a rank holds all entries"


def sharded_script(name: str, least: int) -> ShardedScript:
    """Import a script, or skip the tests of this module if its imports are missing."""
    return ShardedScript(pytest.importorskip(name), least)


def results(training: Job) -> list[dict[str, Any]]:
    """Return the final records of all workers."""
    return [json.loads(file.read_text()) for file in sorted(training.folder.glob("out/*.json"))]


def at_once(folder: Path, rule: str) -> str:
    """Return a rule that hits several workers: from a file, which makes them wait for each other."""
    file = folder / "rules"
    file.write_text(rule)
    return f"@{file}"


def twice(place: str) -> str:
    """Return rules: a worker dies in backward, and another at this place while the others recover."""
    generation = " generation=2" if place == "rendezvous" else ""
    size = 4 if generation else 3
    return f"backward kill slot=1 step=5; {place} kill slot=3 size={size}{generation} step=5"


def twenty() -> tuple[str, int]:
    """Return rules of twenty kills at all places, and the steps to train: each killed worker returns."""
    places = [*PLACES, "backward", "shard-mirror"] * 2
    rules = [
        f"{place} kill slot={kill % 4} incarnation={kill // 4 + 1} step={10 * kill + 5}"
        for kill, place in enumerate(places)
    ]
    return "; ".join(rules), 10 * len(places) + 5


def of_two_that_stayed(
    job: Any, script: ShardedScript, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> list[dict[str, Any]]:
    """Two of four workers leave together on an operator's request. Returns the results of the others."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))  # no other job is found there
    env = {"STEPS": str(steps), "XDG_RUNTIME_DIR": str(folder)}
    training = job("-np 4 --min-np 1", ["python", script.path], env=env)
    training.until(lambda: len(training.worlds()) >= 2, "a world of elastic.run", 90)
    elastic.Job().scale(2)
    training.wait_for_world(2, 60)
    training.succeed(250)
    return results(training)


def ends_without_two_shards(job: Any, script: ShardedScript, folder: Path) -> None:
    """Two neighbours die together, each the only holder of the other's copy: the job ends with an error."""
    rules = at_once(folder, "backward kill slot=1,2 step=5 victims=2")
    env = APART | {"STEPS": "10", "ELASTIC_FAILPOINTS": rules}
    training = job(f"-np 4 --min-np 2 {GONE}", ["python", script.path], env=env)
    assert training.wait(120) != 0
    (end,) = training.actions("EndJob")
    assert end["reason"]["kind"] == ReasonKind.SHARDS_LOST.value


def example_survives_a_kill(job: Any, example: Path) -> None:
    training = job("-np 3 --min-np 2", ["python", example])
    training.until(lambda: "step 50" in training.output, "step 50", 100)
    training.kill(0)
    assert "step 200" in training.succeed(200)


def example_ends_alike(job: Any, example: Path, steps: int, kills: int) -> None:
    """An epoch in which workers die and return ends with the loss of one that nothing happened to."""
    undisturbed = job("-np 4", ["python", example, str(steps)])
    wanted = losses(undisturbed.succeed(600))
    training = job(f"-np 4 --min-np 2 {BACK}", ["python", example, str(steps)])
    training.until(lambda: losses(training.output), "the first loss", 100)
    for kill in range(kills):
        before = len(training.worlds())
        training.kill(kill % 4)
        training.until(lambda before=before: len(training.worlds()) > before, "a new world", 60)
        training.wait_for_world(4, 100)
    found = losses(training.succeed(600))
    assert found[steps] == pytest.approx(wanted[steps], rel=1e-3, abs=1e-3)


def losses(output: str) -> dict[int, float]:
    """Return the losses that an example has printed, by step."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([0-9.]+)", output)
    }
