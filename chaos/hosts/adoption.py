"""When a further driver has the workers of a job again, by its journal. Pure: entries in, a number out."""

from __future__ import annotations

from elastic.chaos.harness.journal_tail import Json, Story
from elastic.protocol.messages import Worker


class Adoptions(Story):
    """``done``: how many drivers that went on with the job have heard of every worker that was in its world."""

    def __init__(self, members: list[Worker] | None = None) -> None:
        """``members``: of the world of before, where the entries do not tell."""
        super().__init__(members=list(members or ()))
        self.done = 0
        self._awaited: set[Worker] = set()

    def hear(self, entry: Json) -> None:
        super().hear(entry)
        event = entry["event"]
        before = bool(self._awaited)
        match event["type"]:
            case "DriverRestarted":
                self._awaited = set(self.members)
            case "WorkerReconnected" | "WorkerExited":
                self._awaited.discard(Worker(*event["worker"]))
            case "HostLost":
                self._awaited = {w for w in self._awaited if w.host != event["host"]}
            case "HostReported":  # who should be listed there, and is not, has gone
                running = {Worker(*each) for each in event["running"]}
                here = {worker for worker in self._awaited if worker.host == event["host"]}
                ordered = event.get("ordered")
                gone = here if ordered is None else here & {Worker(*each) for each in ordered}
                self._awaited -= gone - running
        self.done += before and not self._awaited
