"""Provider of hosts for a job on Spark. Each host is an agent that runs in a Spark task.

See `elastic.driver.job.provider`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from elastic.driver.discovery.interface import Log, ResourceDemand
from elastic.driver.events import Event
from elastic.driver.launch.starter import Bootstrap, Starter
from elastic.driver.spark.cluster import SparkCluster
from elastic.driver.spark.discovery import SparkDiscovery
from elastic.driver.spark.tasks import SparkTasks

FAILED_S = 3.0  # seconds that the job has for determining the cause itself after a stage has failed


class SparkProvider:
    """Provider of hosts whose agents run in the tasks of a Spark application.

    Args:
        context: the SparkContext.
        name: name of the job, unique in the application.
        call: pickled function of the workers.
        secret: secret of the job.
        np: number of workers with which the job starts.
        barrier: whether the agents of these workers run in one barrier stage.
        least: minimum number of workers of an elastic job.
        most: maximum number of workers of an elastic job.
        start_s: seconds to wait for the first tasks to start.
        interfaces: names of interfaces or networks for the workers.
        threads: whether to set the workers' number of threads to the cores of a task.
    """

    outlived = False
    fresh = True
    lost: asyncio.Event | None = None

    def __init__(
        self,
        context: Any,
        *,
        name: str,
        call: bytes,
        secret: bytes,
        np: int,
        least: int,
        most: int,
        barrier: bool,
        start_s: float,
        interfaces: Sequence[str],
        threads: bool,
        log_level: str,
    ) -> None:
        self.secret = secret
        self._context = context
        self._cluster = SparkCluster(context)
        self._towards = [] if self._cluster.local else self._cluster.addresses()
        self._name = name
        self._call = call
        self._sizes = np, least, most
        self._barrier = barrier
        self._start_s = start_s
        self._interfaces = list(interfaces)
        self._limits_threads = threads
        self._log_level = log_level
        self._driver: Any = None
        self._log: Log = lambda level, text: None
        self._discovery: SparkDiscovery | None = None
        self._tasks: SparkTasks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- interface of a provider -------------------------------------------------------------------------------------

    @property
    def towards(self) -> Sequence[str]:
        return self._towards

    def discovery(
        self, log: Log, need: Callable[[], ResourceDemand], noticed: Callable[[Event], None]
    ) -> SparkDiscovery:
        self._log = log
        np, least, _ = self._sizes
        self._discovery = SparkDiscovery(
            wanted=np,
            least=least,
            start_s=self._start_s,
            expired=self._stop,
            leaving=self._cluster.leaving,
            log=log,
        )
        return self._discovery

    def starter(self, log: Log) -> Starter | None:
        return None

    def archive(self) -> None:
        return None

    def environ_of(self, host: str) -> Mapping[str, str]:
        return {}

    def connected(self, hosts: Mapping[str, int]) -> None:
        assert self._discovery is not None and self._tasks is not None
        self._tasks.held = True
        self._discovery.connected(hosts)

    async def listening(self, address: str) -> None:
        """Submit the tasks. Their agents connect to ``address``, on which the driver listens."""
        self._loop = asyncio.get_running_loop()
        np, _, most = self._sizes
        self._tasks = SparkTasks(
            self._context,
            group=f"hvd-elastic-{self._name}",
            number=np if self._barrier else most,
            barrier=self._barrier,
            log=lambda level, text: self._in_loop(lambda: self._log(level, text)),
            failed=lambda why: self._in_loop(lambda: self._tasks_failed(why)),
        )
        bootstrap = Bootstrap(
            job=self._name,
            host="",
            secret=self.secret.hex(),
            drivers=[address],
            interfaces=self._interfaces,
            log_level=self._log_level,
        )
        self._tasks.begin(msgspec.json.encode(bootstrap), self._call, threads=self._limits_threads)

    # ---- for the caller ----------------------------------------------------------------------------------------------

    def begun(self, driver: Any) -> None:
        """Set the driver, which is stopped if the tasks fail."""
        self._driver = driver

    def close(self) -> None:
        """End all tasks, within a time limit. Called after the end of the job."""
        if self._tasks is not None:
            self._tasks.close()

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def _in_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _tasks_failed(self, why: str) -> None:
        assert self._loop is not None
        self._loop.call_later(FAILED_S, self._stop, why)

    def _stop(self, why: str) -> None:
        assert self._driver is not None
        self._driver.stop(why)
