"""What a run's two files say about it: OUT/metrics.jsonl, by the workers, and OUT/journal.jsonl, by the driver."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import journal
from journal import Json

Point = tuple[float, float]


@dataclass(frozen=True)
class Happening:
    """``kind``: killed, recovered, joined or changed. ``at``: seconds since the first step."""

    at: float
    kind: str
    text: str
    pause_ms: float | None = None


@dataclass
class Run:
    """What the two files say. Every time is in seconds since the first step; losses are nats per byte."""

    steps: list[Json]  # the lines that count, one per step: step, loss, workers, tokens_per_s, at
    sizes: list[Point]
    happenings: list[Happening]
    steps_lost: int  # committed, but trained once more
    validation_loss: float | None
    sample: str

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Raises SystemExit if nothing was trained."""
        metrics = list(journal.lines(folder / "metrics.jsonl"))
        written = [line for line in metrics if "step" in line]
        if not written:
            raise SystemExit(f"{folder}/metrics.jsonl has no step; train first: make train")
        start = written[0]["at"]
        for line in written:
            line["at"] -= start
        story = folder / "journal.jsonl"
        last: Json = next((line for line in reversed(metrics) if "sample" in line), {})
        sizes = [
            (max(0.0, at - start), float(len(world["members"])))
            for at, world in journal.actions(story, "PublishWorld")
        ]
        by_step = {line["step"]: line for line in written}
        return cls(
            steps=[by_step[step] for step in sorted(by_step)],
            sizes=sizes or [(0.0, float(written[0]["workers"]))],
            happenings=sorted(happenings(story, start, written), key=lambda each: each.at),
            steps_lost=steps_lost(written),
            validation_loss=last.get("validation_loss"),
            sample=last.get("sample", ""),
        )

    @property
    def seconds(self) -> float:
        return float(self.steps[-1]["at"])

    @property
    def tokens_per_s(self) -> float:
        """Of the middle step: half were faster."""
        return float(statistics.median(line["tokens_per_s"] for line in self.steps))

    def loss(self, *, late: bool) -> float:
        """At the first step, or the mean over the last twenty."""
        lines = self.steps[-20:] if late else self.steps[:1]
        return statistics.fmean(line["loss"] for line in lines)

    def of_kind(self, kind: str) -> list[Happening]:
        return [each for each in self.happenings if each.kind == kind]


def happenings(story: Path, start: float, written: Sequence[Json]) -> Iterable[Happening]:
    """What the journal says, with the pause as the training saw it: the gap between two steps, less a usual step."""
    for at, event in journal.events(story, "WorkerExited"):
        if event["code"] < 0:
            host, slot, _ = event["worker"]
            yield Happening(
                at - start, "killed", f"{host}:{slot} killed by signal {-event['code']}"
            )
    before = size = 0
    for at, action in journal.actions(story, "PublishWorld", "ReportRecovery"):
        if action["type"] == "PublishWorld":
            before, size = size, len(action["members"])
        elif action["generation"] > 1:
            planned = "joined" if size > before else "changed"
            kind = "recovered" if action["kind"] == "recovery" else planned
            phases = ", ".join(f"{name} {ms:.0f}" for name, ms in action["phases_ms"].items())
            copied = action["copied_bytes"] / 1e6
            text = f"{action['size']} workers after {action['total_ms']:.0f} ms ({phases})"
            if copied:
                text += f", {copied:.1f} MB copied"
            # The first world may stand an instant before its first step.
            yield Happening(max(0.0, at - start), kind, text, pause_ms(at - start, written))


def pause_ms(at: float, written: Sequence[Json]) -> float | None:
    """The longest gap between two steps within two seconds of a moment, less the usual one; 0 where none is longer."""
    times = [line["at"] for line in written]
    gaps = [(after - before, before, after) for before, after in itertools.pairwise(times)]
    near = [gap for gap, before, after in gaps if before < at + 2 and after > at - 2]
    usual = statistics.median(gap for gap, _, _ in gaps) if gaps else 0.0
    return 1e3 * max(0.0, max(near) - usual) if near else None


def steps_lost(written: Sequence[Json]) -> int:
    """A step is written down just before its commit. So where step n is followed by n again, none was lost."""
    pairs = itertools.pairwise(line["step"] for line in written)
    return sum(max(0, before - after) for before, after in pairs)
