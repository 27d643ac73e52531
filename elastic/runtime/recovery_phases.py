"""How long each part of a recovery took, for the report that the driver logs. Marks with times passed in; pure."""

from __future__ import annotations


class Phases:
    """One worker's. Marks, in order: broken, raised, restored, ready, world, synced, stepped."""

    def __init__(self) -> None:
        self.copied_bytes = 0
        self.from_checkpoint = False  # see `elastic.protocol.messages.Resumed`
        self._marks: dict[str, float] = {}
        self._ms: dict[str, float] = {}
        self._resumed_generation = 0
        self.spans: list[tuple[str, float, float]] = []  # of the last report: phase, begin, end

    def mark(self, name: str, now: float) -> None:
        self._marks[name] = now
        if name == "ready":  # groups of the world before are no part of this report
            self._ms.pop("formed", None)

    def raised(self, now: float) -> None:
        """The training thread has come back to ``elastic.run``: here the report begins."""
        self.mark("raised", now)
        self._ms = {"raised": self._between("broken", "raised")}

    def broken_at(self) -> float:
        """When the world was last heard to be over, or a planned change stopped it; 0 before that."""
        return self._marks.get("broken", 0.0)

    def restored(self, now: float) -> None:
        self.mark("restored", now)
        self._ms["restored"] = self._between("raised", "restored")

    def formed(self, seconds: float) -> None:
        """A group was made; one report adds them up."""
        self._ms["formed"] = self._ms.get("formed", 0.0) + seconds * 1e3

    def stepped(self, generation: int, now: float) -> tuple[dict[str, float], int, bool] | None:
        """A collective completed. After the first one of user code in a generation: milliseconds by phase, bytes, and
        whether it began with a checkpoint.
        """
        if self._resumed_generation == generation:
            return None
        if self._marks.get("synced", 0.0) < self._marks.get("world", 0.0):
            return None  # a collective of the copying, not yet of user code
        self._resumed_generation = generation
        self.mark("stepped", now)
        self._ms["waited"] = self._between("ready", "world")
        self._ms["synced"] = self._between("world", "synced")
        self._ms["first collective"] = self._between("synced", "stepped")
        self.spans = self._intervals()
        report = self._ms, self.copied_bytes, self.from_checkpoint
        self._ms, self.copied_bytes, self.from_checkpoint = {}, 0, False
        return report

    def _intervals(self) -> list[tuple[str, float, float]]:
        """The phases of the report as they followed each other, for the timeline."""
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
