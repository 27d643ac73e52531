"""Spark jobs whose tasks run agents. Makes no decisions. Each Spark job runs in a separate thread.

A barrier stage starts all of its tasks together, and ends them together. Each ordinary task is a separate Spark job,
because Spark ends a whole job if one of its tasks has failed a few times, even if the failures are due to lost
executors. A task that ends before the training job is restarted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic.driver.output_interfaces import Log
from elastic.driver.spark.agent_task import AgentTask

AGAIN_S = (0.2, 30.0)  # initial and maximum delay before a failed task is restarted, in seconds
RETURNS_S = 3.0  # timeout for tasks to return after their agents have exited, in seconds
CANCELLED_S = 15.0  # timeout for Spark to end the remaining tasks, in seconds
# maximum number of failures of a task before the first agent has connected; equal to Spark's own limit
TRIES = 4


class SparkTasks:
    """Manager of the Spark tasks of one training job.

    Args:
        context: the SparkContext.
        group: name of the Spark job group, unique in the application.
        number: number of tasks.
        barrier: whether to run the tasks in one barrier stage.
        log: called in any thread with the level and the text of each log line.
        failed: called in any thread, with the reason, if the tasks cannot run agents.
    """

    def __init__(
        self,
        context: Any,
        *,
        group: str,
        number: int,
        barrier: bool,
        log: Log,
        failed: Callable[[str], None],
    ) -> None:
        self._context = context
        self._group = group
        self._number = number
        self._barrier = barrier
        self._log = log
        self._failed = failed
        self._closing = threading.Event()
        self._running: list[threading.Thread] = []
        self._call: Any = None
        self._logged = ""
        self.held = False  # whether any agent has connected

    def begin(self, bootstrap: bytes, call: bytes, *, threads: bool) -> None:
        """Submit the tasks.

        Args:
            bootstrap: encoded parameters of the agents.
            call: pickled function of the workers.
            threads: whether to set the workers' number of threads to the cores of a task.
        """
        from pyspark import InheritableThread

        self._call = self._context.broadcast(call)
        task = AgentTask(bootstrap, self._call, self._barrier, threads)
        jobs = [range(self._number)] if self._barrier else [[n] for n in range(self._number)]
        for partitions in jobs:
            thread = InheritableThread(target=self._keep, args=(partitions, task), daemon=True)
            self._running.append(thread)
            thread.start()

    def close(self) -> None:
        """End the tasks, within a time limit. Their agents must already have been told to exit."""
        self._closing.set()
        if not self._joined(RETURNS_S):
            try:
                self._context.cancelJobGroup(self._group)
            except Exception as error:  # the JVM may have exited
                self._log(
                    "warning", f"Spark jobs {self._group} can't be cancelled: {first_line(error)}"
                )
            if not self._joined(CANCELLED_S):
                self._log("warning", f"Spark has not ended all tasks of job group {self._group}")
        if self._call is not None:
            try:
                self._call.destroy()
            except Exception as error:
                self._log("debug", f"the broadcast function can't be removed: {first_line(error)}")

    def _joined(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._running)

    def _keep(self, partitions: Sequence[int], task: AgentTask) -> None:
        """Run the tasks of one Spark job.

        Unless they form a barrier stage, run them again whenever they end, until the training job ends.
        """
        pause_s, tries = AGAIN_S[0], 0
        while not self._closing.is_set():
            try:
                self._run(partitions, task)
                pause_s, why = AGAIN_S[0], ""
            # Spark, its JVM and the task may raise exceptions of any type
            except Exception as error:
                why, tries = cause(error), tries + 1
            if self._closing.is_set():
                return
            if self._barrier:
                # otherwise, the training job has ended, and its agents received an exit request
                if why:
                    self._failed(f"the barrier stage of Spark failed: {why}")
                return
            if why:
                if why != self._logged:
                    self._logged = why
                    self._log("warning", f"a Spark task ended and is restarted: {why}")
                if tries >= TRIES and not self.held:
                    self._failed(f"a Spark task failed {tries} times: {why}")
                    return
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S[1]) if why else AGAIN_S[0]

    def _run(self, partitions: Sequence[int], task: AgentTask) -> None:
        text = "agents of hvd-elastic"
        self._context.setJobGroup(self._group, text, interruptOnCancel=True)
        # SparkContext.range() is not used, because each of its tasks would receive the numbers of all partitions.
        data = self._context.parallelize(list(partitions), len(partitions))
        (data.barrier() if self._barrier else data).mapPartitions(task).collect()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def cause(error: BaseException) -> str:
    """Return the reason why a Spark job failed: the last line of a task's traceback or, without one, of the error."""
    java: Any = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [
        line
        for line in lines
        if ": " in line and line.split(": ")[0].endswith(("Error", "Ended", "Exception"))
    ]
    python = [line for line in raised if not line.startswith(("org.", "java."))]
    return (python or lines or [type(error).__name__])[0][:300]
