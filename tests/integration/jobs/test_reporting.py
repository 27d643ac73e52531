"""Reports of real workers: alone, with a driver that is stopped meanwhile, and through agents to successive drivers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import wording
from harness.forking import SPARE_WORKERS
from harness.history import SCRIPTS
from harness.job import MARK
from harness.processes import clean_environment
from harness.program import Program
from harness.waiting import wait_until

PROGRAM = str(SCRIPTS / "reporting.py")
DEADLINE_S = 60.0


class Driver(Program):
    """A driver, and workers that report."""

    def __init__(self, folder: Path, *words: str) -> None:
        env = clean_environment() | {SPARE_WORKERS: "2"}
        super().__init__([PROGRAM, *words], folder=folder, env=env, mark=MARK, forked=True)

    def result(self, word: str = "result") -> Any:
        """Return its output at its end."""
        self.succeed(DEADLINE_S)
        [line] = [each for each in self.lines if each.startswith(f"{word} ")]
        return json.loads(line.removeprefix(f"{word} "))

    def dropped(self) -> int:
        """Return its log."""
        return sum(map(int, re.findall(wording.REPORTS_WERE_DROPPED, self.output)))


@pytest.fixture
def driver(tmp_path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(*words: str) -> Driver:
        started.append(Driver(tmp_path, *words))
        return started[-1]

    yield start
    left = [process for each in started for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"


def test_all_reports_are_delivered_before_launch_returns_when_the_callback_raises(driver):
    launched = driver("few")
    result = launched.result()
    assert result["values"] == [0, 1]
    assert result["numbers"] == {str(rank): [*range(301)] for rank in range(2)}
    first, last = result["lines"]
    assert first["loss"] == 2.0 and first["nan"] != first["nan"]
    assert len(last["text"]) == 60_000 and last["nested"] == {"a": [1, None, True]}
    assert result["raised"] == 2
    assert launched.output.count(wording.CALLBACK_REPORTS_RAISED_KEYERROR) == 1


def test_newest_reports_arrive_after_a_stopped_driver_continues(driver, tmp_path):
    launched = driver("many")
    launched.until(lambda: "has 1 worker" in launched.output, "its world", DEADLINE_S)
    launched.process.send_signal(signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    launched.until((tmp_path / "made").exists, "20 MB of reports", DEADLINE_S)
    launched.process.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    [numbers] = launched.result()["numbers"].values()
    assert numbers == sorted(set(numbers)) and numbers[0] == 0 and numbers[-1] == 3999
    assert 1000 < len(numbers) < 1100, "the window, and the last 1000"
    assert launched.dropped() == 4000 - len(numbers)


def test_successor_driver_gets_the_remaining_reports_through_agents(driver, tmp_path):
    hosts = ["-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1"]
    flags = [*hosts, "--journal", "journal", "--resume"]
    first = driver("drive", *flags)

    def made(rank: int) -> int:
        path = tmp_path / f"made.{rank}"
        return int(path.read_text()) if path.exists() else 0

    def heard(by: Driver) -> dict[int, list[int]]:
        """The numbers of each rank."""
        found: dict[int, list[int]] = {0: [], 1: []}
        path = tmp_path / "reports"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        for line in whole.splitlines():
            report = json.loads(line)
            if report["driver"] == by.process.pid:
                assert report["worker"].startswith(["localhost:0#", "127.0.0.2:0#"][report["rank"]])
                assert report["generation"] == 2 and report["size"] == 2
                found[report["rank"]].append(report["metrics"]["samples seen"])
        return found

    first.until(
        lambda: all(len(each) > 20 for each in heard(first).values()), "some reports", DEADLINE_S
    )
    first.process.kill()
    first.process.wait(DEADLINE_S)
    absent = [made(0), made(1)]
    wait_until(lambda: all(made(r) >= absent[r] + 100 for r in range(2)), "reports to no driver")
    second = driver("drive", *flags)
    second.until(
        lambda: all(len(each) > 120 for each in heard(second).values()), "the rest", DEADLINE_S
    )
    (tmp_path / "go").touch()
    last = second.result("last")
    before, after = heard(first), heard(second)
    missing = 0
    for rank in range(2):
        numbers, end = after[rank], last[str(rank)]
        assert before[rank] == [*range(len(before[rank]))]
        assert numbers == sorted(set(numbers)), "each once, in order"
        assert numbers[0] <= len(before[rank]), "none between the two"
        assert end["last"] and end["samples seen"] == numbers[-1] == made(rank)
        missing += numbers[-1] - numbers[0] + 1 - len(numbers)
    assert missing == second.dropped(), "none, unless the machine is very busy"
    journal = (tmp_path / "journal").read_text()
    assert "WorkerReconnected" in journal and "samples seen" not in journal
