"""Queries of a Spark application through its JVM. Makes no decisions. All methods may block.

Spark has no public function for the number of tasks that can run at the same time, and for executors that are being
decommissioned. The functions used here are public in the JVM, and exist in Spark 3.5 and 4.0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class SparkCluster:
    """Queries of the Spark application that a SparkContext belongs to."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._scala: Any = context._jsc.sc()

    @property
    def local(self) -> bool:
        """Return whether tasks run in the process of Spark's driver, with a fixed number of slots."""
        master = str(self._context.master)
        return master == "local" or master.startswith("local[")

    @property
    def dynamic(self) -> bool:
        """Return whether the number of executors follows the number of tasks."""
        return bool(self._scala.executorAllocationManager().isDefined())

    def slots(self) -> int:
        """Return the number of tasks that the current executors can run at the same time."""
        profile = self._scala.resourceProfileManager().defaultResourceProfile()
        return int(self._scala.maxNumConcurrentTasks(profile))

    def addresses(self) -> list[str]:
        """Return the names or addresses of all executors, followed by that of Spark's driver."""
        status: Any = self._scala.getExecutorMemoryStatus().keySet().toSeq()
        names = [str(status.apply(i)).rpartition(":")[0] for i in range(status.size())]
        own = str(self._context._conf.get("spark.driver.host", ""))
        return sorted(dict.fromkeys(names), key=lambda name: name == own)

    def leaving(self, executors: Collection[str]) -> set[str]:
        """Return the executors, among the given ones, that accept no new tasks because they are decommissioned
        or lost.
        """
        if self.local:
            return set()
        backend = self._scala.schedulerBackend()
        return {each for each in executors if not backend.isExecutorActive(each)}
