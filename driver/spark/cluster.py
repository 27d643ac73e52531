"""Queries of a Spark application through its JVM. Makes no decisions. All methods may block.

Spark's Python API has no function for the number of tasks that can run concurrently or for the executors that are being
decommissioned. The functions used here are public in the JVM, and exist in Spark 3.5 and 4.0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class SparkCluster:
    """Interface for queries of the Spark application to which a SparkContext belongs."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._scala: Any = context._jsc.sc()

    @property
    def local(self) -> bool:
        """Return whether tasks run in the process of the Spark driver, with a fixed number of slots."""
        master = str(self._context.master)
        return master == "local" or master.startswith("local[")

    @property
    def dynamic(self) -> bool:
        """Return whether the number of executors follows the number of tasks."""
        return bool(self._scala.executorAllocationManager().isDefined())

    def slots(self) -> int:
        """Return the number of tasks that the current executors can run concurrently."""
        profile = self._scala.resourceProfileManager().defaultResourceProfile()
        return int(self._scala.maxNumConcurrentTasks(profile))

    def addresses(self) -> list[str]:
        """Return the names or addresses of all executors, followed by that of the Spark driver."""
        status: Any = self._scala.getExecutorMemoryStatus().keySet().toSeq()
        names = [str(status.apply(i)).rpartition(":")[0] for i in range(status.size())]
        own = str(self._context._conf.get("spark.driver.host", ""))
        return sorted(dict.fromkeys(names), key=lambda name: name == own)

    def leaving(self, executors: Collection[str]) -> set[str]:
        """Return those of the given executors that accept no new tasks.

        They are being decommissioned, or are lost.
        """
        if self.local:
            return set()
        backend = self._scala.schedulerBackend()
        return {each for each in executors if not backend.isExecutorActive(each)}
