"""Interface of all components that start workers for the event loop. Implementations make no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.events import Event, WorkerExited
from elastic.protocol.messages import Worker


class Launcher(Protocol):
    """Interface for starting, monitoring and killing workers. All methods are called in the thread of the driver's
    event loop.
    """

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        """Set the callbacks. Must be called once, before all other methods.

        Args:
            exited: called exactly once for each started worker.
            noticed: called with other observations of processes: WorkerFrozen, WorkerThawed, WorkerProbed,
                WorkerHealthChecked, BandwidthMeasured.
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
        """Inspect the processes of these workers. A WorkerProbed is reported for each. Unknown workers are ignored."""

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        """Make a worker write the stack of its training thread, if possible. Unknown workers are ignored.

        Args:
            worker: the worker.
            all_threads: whether its other threads write their stacks too.
        """

    def measure(self, host: str, peer: str) -> None:
        """Measure the bandwidth between two hosts. A BandwidthMeasured is reported, unless a host is lost during the
        measurement.
        """

    def give_up(self, host: str, why: str) -> None:
        """Declare an unresponsive host lost. `HostLost` is then reported.

        Does nothing if the host's agent is in this process.
        """

    def alive(self) -> frozenset[Worker]:
        """Return the started workers that have not been reported as exited."""

    async def close(self) -> None:
        """Kill all workers, wait for their exits within a time limit, and release all resources."""
