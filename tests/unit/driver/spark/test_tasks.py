"""Spark jobs whose tasks hold agents: barrier stages and ordinary tasks, failures, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

from elastic.driver.spark import tasks as tasks_module
from elastic.driver.spark.tasks import TRIES, SparkTasks, cause, first_line

pyspark = pytest.importorskip("pyspark")


class Bench:
    """Tasks on a context whose jobs call ``job``."""

    def __init__(
        self, job: Callable[[], object], *, number: int = 1, barrier: bool = False
    ) -> None:
        self.context = create_autospec(pyspark.SparkContext, instance=True)
        self.rdd: Any = MagicMock(spec=pyspark.RDD)
        self.rdd.barrier.return_value = self.rdd
        self.rdd.mapPartitions.return_value.collect.side_effect = job
        self.context.parallelize.return_value = self.rdd
        self.failures: list[str] = []
        self.failed = threading.Event()
        self.lines: list[tuple[str, str]] = []
        self.tasks = SparkTasks(
            self.context,
            group="job",
            number=number,
            barrier=barrier,
            log=lambda level, text: self.lines.append((level, text)),
            failed=self._failed,
        )

    def _failed(self, why: str) -> None:
        self.failures.append(why)
        self.failed.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tasks_module, "AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(tasks_module, "RETURNS_S", 0.01)
    monkeypatch.setattr(pyspark, "InheritableThread", threading.Thread)


def test_barrier_stage_is_one_spark_job_and_ends_once():
    ended = threading.Event()
    bench = Bench(ended.set, number=3, barrier=True)
    bench.tasks.begin(b"", b"call", threads=True)
    assert ended.wait(10)
    bench.tasks.close()
    bench.context.parallelize.assert_called_once_with([0, 1, 2], 3)
    assert bench.rdd.barrier.called
    assert not bench.failures
    assert not bench.context.cancelJobGroup.called


def test_failed_barrier_stage_fails_the_job():
    def fail() -> None:
        raise OSError("no room")

    bench = Bench(fail, number=3, barrier=True)
    bench.tasks.begin(b"", b"call", threads=True)
    assert bench.failed.wait(10)
    bench.tasks.close()
    assert len(bench.failures) == 1


def test_ordinary_task_starts_again_until_the_job_ends():
    runs = threading.Semaphore(0)

    def fail() -> None:
        runs.release()
        raise OSError("executor lost")

    bench = Bench(fail)
    bench.tasks.held = True
    bench.tasks.begin(b"", b"call", threads=True)
    for _ in range(2 * TRIES):
        assert runs.acquire(timeout=10)
    bench.tasks.close()
    assert not bench.failures
    assert [level for level, _ in bench.lines] == ["warning"], "one reason is logged once"


def test_task_that_never_holds_an_agent_fails_the_job():
    def fail() -> None:
        raise OSError("no Python")

    bench = Bench(fail)
    bench.tasks.begin(b"", b"call", threads=True)
    assert bench.failed.wait(10)
    bench.tasks.close()
    assert len(bench.failures) == 1


def test_tasks_that_wait_are_cancelled_at_the_end():
    cancelled = threading.Event()
    bench = Bench(lambda: cancelled.wait(10), number=2)
    bench.context.cancelJobGroup.side_effect = lambda group: cancelled.set()
    bench.tasks.begin(b"", b"call", threads=True)
    bench.tasks.close()
    bench.context.cancelJobGroup.assert_called_once_with("job")
    assert bench.context.broadcast.return_value.destroy.called


class Py4JError(Exception):
    """As py4j raises it, with an exception of the JVM."""

    def __init__(self, message: str) -> None:
        super().__init__("An error occurred while calling z:org.apache")
        self.java_exception = MagicMock()
        self.java_exception.getMessage.return_value = message


FAILED = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task
 org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "agent_task.py", line 90, in __call__
    self._hold(context, [own])
elastic.driver.spark.agent_task.AgentEnded: the agent on h-0-1 ended with exit code 1
\tat org.apache.spark.api.python.BasePythonRunner
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Py4JError(FAILED), "the agent on h-0-1 ended with exit code 1"),
        (Py4JError("Job 3 cancelled part of cancelled job group"), "Job 3 cancelled"),
        (OSError(), "OSError"),
    ],
)
def test_cause_is_the_error_of_the_task(error, words):
    assert words in cause(error)


def test_first_line_is_never_empty():
    assert first_line(OSError("a\nb")) == "a"
    assert first_line(OSError()) == "OSError"
