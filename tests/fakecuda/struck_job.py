"""A job on fake GPUs under repeated faults, and the cost of each fault. It runs `scripts/training.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakecuda.strikes import FULL, GPUS, HOSTS, SPARING, Strike
from harness.history import RETURN, History, started
from harness.job import Job
from harness.processes import lives

CONNECT_S = 20.0
START_S = 240.0  # for workers to start; the import takes long on a busy machine
INIT = re.compile(r"init (\w{8}) from ([\d.]+) to ([\d.]+)")
Json = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """Of one fault: seconds until the last of the others had done its next step; in them those that NCCL itself took.
    ``lost_too``: workers that should not have been lost by it.
    """

    number: int
    kind: str
    seconds: float
    nccl_s: float
    lost_too: int
    load: float


class StruckJob:
    """Two hosts with two GPUs each; lost workers return. Every wait has a deadline with a description."""

    def __init__(
        self, job: Callable[..., Job], fake_cuda: Callable[..., dict[str, str]], **env: str
    ) -> None:
        places = ",".join(f"{host}:{GPUS}" for host in HOSTS)
        flags = f"--max-np {FULL} -H {places} {RETURN} --slot-attempts 50"
        variables = fake_cuda(gpus=GPUS, FAKE_FAULTS="@faults", FAKE_CUDA_LOG="1")
        variables |= {"DEVICE": "cuda", "ENDS": "over", "PACE": "0.1"} | env
        flags += f" --gloo-timeout-seconds {CONNECT_S:g}"
        self.job = started(job, FULL, flags, **variables)
        self.folder = self.job.folder
        self._read: dict[Path, int] = {}  # bytes of each file
        self._steps: dict[int, dict[int, list[Json]]] = defaultdict(lambda: defaultdict(list))
        self._lines = 0
        self._inits: dict[str, list[tuple[float, float]]] = defaultdict(list)
        # Processes with an abort that never ends: each is lost, but not before another world breaks.
        self._spent: set[int] = set()

    # ---- faults ----------------------------------------------------------------------------------------------------

    def suffer(self, number: int, strike: Strike) -> Cost:
        """Wait until the world is complete again. Raises AssertionError if that takes too long."""
        before = self.whole(START_S)
        pids = set(self._steps[before])
        once = f"struck.{number}"
        self._arm("; ".join(strike.rules).replace("ONCE", once).replace("; ", ";"))
        files = [self.folder / f"{once}.{n}" for n in range(strike.once)]
        rank_of = {pid: steps[0]["rank"] for pid, steps in self._steps[before].items()}
        # A hanging abort can't start another one: its process may be lost before it reaches another.
        spent = self._spent & pids
        again = strike.hangs in {rank_of[pid] for pid in spent}
        awaited = [
            file
            for file, act in zip(files, strike.acts, strict=True)
            if not (again and act == "abort:hang")
        ]
        self._until(lambda: all(map(whole_file, awaited)), f"the fault, {strike}", CONNECT_S + 10)
        victims, at = set(), 0.0
        for file, act in zip(files, strike.acts, strict=True):
            if file in awaited or whole_file(file):
                pid, when = file.read_text().split()
                at = max(at, float(when))
                if act == "abort:hang":
                    self._spent.add(int(pid))
                elif act not in SPARING:
                    victims.add(int(pid))
        if strike.killed is not None:
            victim = next(pid for pid, rank in rank_of.items() if rank == strike.killed)
            at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            victims.add(victim)
        assert len(victims) == strike.lost, f"{strike} struck {victims}"
        allowed_s = CONNECT_S + strike.allowed_s
        self._until(lambda: self._resumed(before, at) is not None, "the next step", allowed_s)
        until = self._resumed(before, at)
        assert until is not None
        self._until(
            lambda: not any(map(lives, victims)), f"the end of the processes {victims}", allowed_s
        )
        self._arm("")
        self.whole(START_S)
        gone = {pid for pid in pids if not lives(pid)}
        left = spent - gone
        assert not left, f"processes {left} hold communicators of a world before the last one"
        too = gone - victims - self._spent
        load = os.getloadavg()[0]
        return Cost(number, strike.kind, until - at, self._nccl_s(at, until), len(too), load)

    def finish(self) -> History:
        """End the training and check all records."""
        (self.folder / "over").touch()
        self.job.succeed(90)
        return History(self.job)

    def _arm(self, rules: str) -> None:
        new = self.folder / "faults.new"
        new.write_text(rules + "\n")
        new.rename(self.folder / "faults")

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def whole(self, timeout_s: float) -> int:
        """Return the newest generation, once it has all workers, and each has made two steps in it."""

        def found() -> bool:
            newest = self._steps.get(max(self._steps, default=0), {})
            return len(newest) == FULL and all(len(steps) >= 2 for steps in newest.values())

        self._until(found, f"steps of {FULL} workers", timeout_s)
        return max(self._steps)

    def _resumed(self, before: int, at: float) -> float | None:
        """Return when the last member of a later generation had made its first step; the first such generation."""
        for generation in sorted(g for g in self._steps if g > before):
            firsts = [steps[0] for steps in self._steps[generation].values()]
            if len(firsts) == firsts[0]["size"] and min(step["at"] for step in firsts) > at:
                return max(float(step["at"]) for step in firsts)
        return None

    def _until(self, true: Callable[[], bool], awaited: str, timeout_s: float) -> None:
        def found() -> bool:
            self._look()
            return true()

        self.job.until(found, awaited, timeout_s)

    def _look(self) -> None:
        for path in (self.folder / "history").glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                new, end, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(new) + len(end)
            for record in map(json.loads, new.splitlines()):
                if record["what"] == "step":
                    self._steps[record["generation"]][record["pid"]].append(record)
        lines = self.job.lines
        for line in lines[self._lines :]:
            if found := INIT.search(line):
                self._inits[found[1]].append((float(found[2]), float(found[3])))
        self._lines = len(lines)

    def _nccl_s(self, begin: float, end: float) -> float:
        """Return NCCL's time for new communicators between these times, from the arrival of all their ranks."""
        made = [each for each in self._inits.values() if begin < max(b for _, b in each) < end]
        return sum(max(b for _, b in each) - max(a for a, _ in each) for each in made)


def whole_file(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().endswith("\n")
    return False
