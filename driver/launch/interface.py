"""What the loop asks of whatever starts workers. Adapters of this interface have no policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic.driver.events import Event, WorkerExited
from elastic.protocol.messages import Worker


class Launcher(Protocol):
    """Starts, watches and kills worker processes. All calls come from the thread of the driver's event loop."""

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        """Called once, before anything else. ``exited`` is called exactly once per started worker.

        ``noticed`` is told what else is seen of the processes: WorkerFrozen, WorkerThawed, WorkerProbed.
        """

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start ``command`` as this worker with exactly this environment.

        Never raises for what the outside does: a missing program or a lost host comes back as an exit, with
        code 127 or 126 and a ``reason``.
        """

    def kill(self, worker: Worker) -> None:
        """SIGKILL the worker and its children; its exit comes back through ``exited``. Unknown ones are ignored."""

    def probe(self, workers: Sequence[Worker]) -> None:
        """Look at what these processes do; each comes back as WorkerProbed. Unknown ones are ignored."""

    def dump(self, worker: Worker) -> None:
        """Have the worker write the stacks of its threads, if it is able to. Unknown ones are ignored."""

    def give_up(self, host: str, why: str) -> None:
        """Take a host for lost that does not answer: `HostLost` is noticed. Nothing where its agent is ours."""

    def alive(self) -> frozenset[Worker]:
        """Workers that were started and whose exit was not reported yet."""

    async def close(self) -> None:
        """Kill what is left, wait for it within a bound, and release everything."""
