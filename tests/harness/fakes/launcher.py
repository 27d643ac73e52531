"""A launcher without processes, for tests: it records its calls and reports exits on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic.driver.events import Event, HostLost, WorkerExited
from elastic.protocol.messages import Worker


class FakeLauncher:
    """Launcher whose workers live until ``exit`` is called or they are killed."""

    def __init__(self) -> None:
        self.started: list[Worker] = []
        self.killed: list[Worker] = []
        self.probed: list[Worker] = []
        self.dumped: list[Worker] = []
        self.measured: list[tuple[str, str]] = []
        self.environments: dict[Worker, dict[str, str]] = {}
        self.closed = False
        self._alive: set[Worker] = set()
        self._exited: Callable[[WorkerExited], None] = lambda event: None
        self._missing: set[str] = set()
        self.noticed: Callable[[Event], None] = lambda event: None

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        self._exited = exited
        self.noticed = noticed

    def lose_program(self, program: str) -> None:
        """Let starts of ``program`` fail from now on as with a missing file."""
        self._missing.add(program)

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        assert worker not in self._alive, f"{worker} runs already"
        self.started.append(worker)
        self.environments[worker] = dict(env)
        self._alive.add(worker)
        if command[0] in self._missing:
            self.exit(worker, 127, reason=f"cannot start {command[0]!r}: it does not exist")

    def exit(self, worker: Worker, code: int, *, reason: str = "", output: str = "") -> None:
        """End the worker's process."""
        self._alive.remove(worker)
        self._exited(WorkerExited(worker, code, reason, output))

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)
        if worker in self._alive:
            self.exit(worker, -9)

    def probe(self, workers: Sequence[Worker]) -> None:
        """Record the kill; the test reports its result with ``noticed``."""
        self.probed += workers

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        self.dumped.append(worker)

    def measure(self, host: str, peer: str) -> None:
        """Record the measurement; the test reports its result with ``noticed``."""
        self.measured.append((host, peer))

    def give_up(self, host: str, why: str) -> None:
        self.noticed(HostLost(host, why))

    def alive(self) -> frozenset[Worker]:
        return frozenset(self._alive)

    async def close(self) -> None:
        for worker in sorted(self._alive):
            self.kill(worker)
        self.closed = True
