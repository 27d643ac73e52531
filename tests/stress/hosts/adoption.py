"""Detection, from its journal, of when another driver has all workers of a job again. Pure."""

from __future__ import annotations

from elastic.chaos.harness.journal_tail import JobProgress, Json
from elastic.protocol.messages import Worker


class Adoptions(JobProgress):
    """Counter of failovers. ``done``: number of successor drivers that every worker of their world has contacted."""

    def __init__(self, members: list[Worker] | None = None) -> None:
        """``members``: of the previous world, if the entries do not include it."""
        super().__init__(members=list(members or ()))
        self.done = 0
        self._awaited: set[Worker] = set()

    def update(self, entry: Json) -> None:
        super().update(entry)
        event = entry["event"]
        before = bool(self._awaited)
        match event["type"]:
            case "DriverRestarted":
                self._awaited = set(self.members)
            case "WorkerReconnected" | "WorkerExited":
                self._awaited.discard(Worker(*event["worker"]))
            case "HostLost":
                self._awaited = {w for w in self._awaited if w.host != event["host"]}
            case "HostReported":  # a worker that should be listed and is not has exited
                running = {Worker(*each) for each in event["running"]}
                here = {worker for worker in self._awaited if worker.host == event["host"]}
                ordered = event.get("ordered")
                gone = here if ordered is None else here & {Worker(*each) for each in ordered}
                self._awaited -= gone - running
        self.done += before and not self._awaited
