"""Log lines about new worlds and recoveries. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.driver.events import PublishWorld, ReportRecovery
from elastic.driver.monitoring.shard_status import recovery_facts, source_sentence
from elastic.driver.reasons import ReasonKind, because, counted

_VERBS = {"recovery": "recovered", "change": "changed", "start": "started"}
LONG_S = 5.0  # minimum duration of a job's start for which its parts are logged, in seconds
SHORT_S = 0.5  # minimum duration of a part that is logged, in seconds


@dataclass
class JobStart:
    """Times at which the start of a job reached its milestones, in seconds on one clock.

    Args:
        began: time at which the driver ordered the first workers.
        connected: time at which the first world was published, after all its workers had called init(). None before
            that.
        entered: time at which the newest world was published. When training begins, this is the first world in
            elastic.run.
    """

    began: float
    connected: float | None = None
    entered: float | None = None

    def published(self, now: float) -> None:
        """Record a new world."""
        self.connected = now if self.connected is None else self.connected
        self.entered = now

    def parts(self, now: float) -> list[tuple[str, float]]:
        """Return the parts of a job's start if training begins ``now``.

        Each part is a pair of the name of its end and its duration in seconds.
        """
        parts = [("a step", now - (self.entered or self.began))]
        if self.connected is not None and self.entered is not None:
            if self.entered > self.connected:
                parts.insert(0, ("elastic.run", self.entered - self.connected))
            parts.insert(0, ("init()", self.connected - self.began))
        return parts


def start_line(report: ReportRecovery, start: JobStart, now: float) -> str:
    """Return the log line about the start of training.

    For example ``training started after 78 s with 2 workers: 71 s to init(), 5.1 s to elastic.run, 1.7 s to a step``.
    Short parts are omitted. If the whole start was short, all parts are omitted.
    """
    total_s = now - start.began
    text = f"training started after {_s(total_s)} with {counted(report.size, 'worker')}"
    parts = [f"{_s(took)} to {end}" for end, took in start.parts(now) if took >= SHORT_S]
    return text if total_s < LONG_S else f"{text}: {', '.join(parts)}"


def world_line(world: PublishWorld, *, before: str, wanted: int, slots: int) -> str:
    """Return the log line about a new world.

    For example ``generation 3 has 3 workers: 3 of 4 stayed``.

    Args:
        world: the new world.
        before: the previous log line. If it ends with the same cause, the cause is not repeated.
        wanted: number of workers given by -np.
        slots: number of listed slots.
    """
    size, reason = len(world.members), world.reason
    if reason.kind is ReasonKind.FIRST_WORLD and size < wanted:
        reason = because(ReasonKind.FIRST_WORLD, members=size, wanted=wanted, slots=slots)
    text = f"generation {world.generation} has {counted(size, 'worker')}"
    cause = reason.facts.get("cause")
    if reason.kind is ReasonKind.NEXT_WORLD and cause is not None and before.endswith(str(cause)):
        new = f", {reason.facts['new']} joined" if reason.facts["new"] else ""
        return f"{text}: {reason.facts['ready']} of {reason.facts['members']} stayed{new}"
    return f"{text}: {reason}"


def recovery_line(
    report: ReportRecovery, *, held: bool | None = None, committed: bool = True
) -> str:
    """Return the log line about a recovery.

    For example ``recovered in 83 ms with 3 workers, generation 5; no committed step lost``.

    Args:
        report: the recovery.
        held: whether a member held a commit.
        committed: whether any commit was made in this job. If not, the members hold the initial state.
    """
    verb = _VERBS.get(report.kind, report.kind)
    size = counted(report.size, "worker")
    text = f"{verb} in {_ms(report.total_ms)} ms with {size}, generation {report.generation}"
    if report.kind != "recovery" or held is None:
        return text
    lost = "no committed step lost" if held else "no worker held a commit"
    if held and report.shards is not None and report.shards.restored is not None:
        # A later commit may have been lost with a worker, before all ranks had a copy.
        lost = f"resumed from commit {report.shards.restored}, the newest with all shards"
    if held and not committed:
        lost = "no commit yet; training starts over"
    if report.from_checkpoint:
        lost = "back to the newest checkpoint"
    if report.back_to is not None:
        lost = f"back to step {report.back_to}"
    source = source_sentence(recovery_facts(report.shards))
    return "; ".join(filter(None, (text, lost, source)))


def phases_line(report: ReportRecovery) -> str:
    """Return the log line about the phases of a recovery.

    For example ``phases of generation 5 in ms: gathered 9, formed 41, copied 12.3 MB: lost localhost:2#1``.
    """
    phases = ", ".join(f"{name} {_ms(ms)}" for name, ms in report.phases_ms.items())
    copied = f", copied {report.copied_bytes / 1e6:.1f} MB" if report.copied_bytes else ""
    return f"phases of generation {report.generation} in ms: {phases}{copied}: {report.reason}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if 0 < ms < 1 else f"{ms:.0f}"
