"""Interface of the launchers, which start workers for the driver's event loop. Implementations make no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.events import Event, WorkerExited
from elastic.protocol.messages import Worker


class Launcher(Protocol):
    """Interface for starting, monitoring and killing workers.

    The driver calls all methods in the thread of its event loop.
    """

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        """Set the callbacks. Must be called once, before all other methods.

        Args:
            exited: called exactly once for each started worker.
            noticed: called with all other events about workers and hosts, such as WorkerFrozen, WorkerThawed,
                WorkerProbed, WorkerHealthChecked and BandwidthMeasured.
        """

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start ``command`` as this worker, with exactly this environment.

        A missing program or a lost host raises no exception. It is reported as an exit with code 127 or 126 and a
        ``reason``.
        """

    def kill(self, worker: Worker) -> None:
        """Send SIGKILL to a worker and its children.

        The worker's exit is then passed to ``exited``. Unknown workers are ignored.
        """

    def probe(self, workers: Sequence[Worker]) -> None:
        """Inspect the workers' processes and report a WorkerProbed event for each. Unknown workers are ignored."""

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        """Make a worker print the stack of its training thread to stderr, if possible. Unknown workers are ignored.

        Args:
            worker: the worker.
            all_threads: whether to print the stacks of its other threads as well.
        """

    def measure(self, host: str, peer: str) -> None:
        """Measure the bandwidth between two hosts and report a BandwidthMeasured event.

        No event is reported if a host is lost during the measurement.
        """

    def give_up(self, host: str, why: str) -> None:
        """Declare an unresponsive host lost, and report a HostLost event.

        Does nothing if the host's agent is in this process.
        """

    def alive(self) -> frozenset[Worker]:
        """Return the started workers that have not been reported as exited."""

    async def close(self) -> None:
        """Kill all workers, wait for their exits within a time limit, and release all resources."""
