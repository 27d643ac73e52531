"""Durations of the phases of a recovery, for the driver's log. Pure: times are passed in."""

from __future__ import annotations

from elastic.protocol.messages import ShardsPlaced


class Phases:
    """Times at which a worker's recovery reached each phase.

    The phases are broken, raised, restored, ready, world, synced and stepped.
    """

    def __init__(self) -> None:
        self.copied_bytes = 0
        self.from_checkpoint = False  # see `elastic.protocol.messages.Resumed`
        self.shards: ShardsPlaced | None = None  # see `elastic.protocol.messages.Resumed`
        self._marks: dict[str, float] = {}
        self._ms: dict[str, float] = {}
        self._resumed_generation = 0
        # name, begin and end of each phase in the last report
        self.spans: list[tuple[str, float, float]] = []

    def mark(self, name: str, now: float) -> None:
        self._marks[name] = now
        if name == "ready":  # Groups of the previous world do not belong to this report.
            self._ms.pop("formed", None)

    def raised(self, now: float) -> None:
        """Start a report. This method is called when the training thread has returned to ``elastic.run``."""
        self.mark("raised", now)
        self._ms = {"raised": self._between("broken", "raised")}

    def broken_at(self) -> float:
        """Return the time at which the last world failed or was stopped by a planned change, or 0 without either."""
        return self._marks.get("broken", 0.0)

    def restored(self, now: float) -> None:
        self.mark("restored", now)
        self._ms["restored"] = self._between("raised", "restored")

    def formed(self, seconds: float) -> None:
        """Add the time that the creation of a group took."""
        self._ms["formed"] = self._ms.get("formed", 0.0) + seconds * 1e3

    def stepped(
        self, generation: int, now: float
    ) -> tuple[dict[str, float], int, bool, ShardsPlaced | None] | None:
        """Record a completed collective.

        Return the report if this is user code's first collective in a generation, else None.

        The report consists of the milliseconds of each phase, the number of copied bytes, whether the world began from
        a checkpoint, and the placement of shards.
        """
        if self._resumed_generation == generation:
            return None
        if self._marks.get("synced", 0.0) < self._marks.get("world", 0.0):
            # Ignore the collectives of the state copy, which are not part of user code.
            return None
        self._resumed_generation = generation
        self.mark("stepped", now)
        self._ms["waited"] = self._between("ready", "world")
        self._ms["synced"] = self._between("world", "synced")
        self._ms["first collective"] = self._between("synced", "stepped")
        self.spans = self._intervals()
        report = self._ms, self.copied_bytes, self.from_checkpoint, self.shards
        self._ms, self.copied_bytes, self.from_checkpoint, self.shards = {}, 0, False, None
        return report

    def _intervals(self) -> list[tuple[str, float, float]]:
        begins = ["broken", "raised"] if "raised" in self._ms else []
        begins += ["ready", "world", "synced"]
        ends = ["raised", "restored", "world", "synced", "stepped"][-len(begins) :]
        names = ["raised", "restored", "waited", "synced", "first collective"][-len(begins) :]
        marks = self._marks
        return [
            (name, marks[begin], max(marks[begin], marks[end]))
            for name, begin, end in zip(names, begins, ends, strict=True)
            if begin in marks and end in marks
        ]

    def _between(self, earlier: str, later: str) -> float:
        return max(0.0, (self._marks[later] - self._marks.get(earlier, self._marks[later])) * 1e3)
