"""Judgement of the scenarios' results, also as a documentation page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stress.hosts.steps import SurvivorSteps


@dataclass(frozen=True)
class Mark:
    """Requirements of a scenario. None: no requirement. ``failed``: maximum number of failed steps."""

    next_step_ms: float | None = None
    failed: int | None = None
    adopted_ms: float | None = None
    interrupted: bool | None = None

    def eased(self, slack: float) -> Mark:
        """Return the requirements with all times multiplied by ``slack``."""
        step, adopted = self.next_step_ms, self.adopted_ms
        return replace(
            self,
            next_step_ms=None if step is None else step * slack,
            adopted_ms=None if adopted is None else adopted * slack,
        )


@dataclass(frozen=True)
class ScenarioMeasurement:
    """One fault of a job, and its consequences.

    ``adopted_ms``: until another driver had all workers. ``survivors``: expected number of surviving workers; None: not
    predictable.
    """

    what: str
    aftermath: SurvivorSteps
    survivors: int | None
    mark: Mark = field(default_factory=Mark)
    adopted_ms: float | None = None

    @property
    def troubles(self) -> list[str]:
        """Unmet requirements, as sentences."""
        seen, mark = self.aftermath, self.mark
        found = []
        if self.survivors is not None and seen.survivors != self.survivors:
            found.append(f"{seen.survivors} workers came through, expected {self.survivors}")
        if seen.next_step_ms is None:
            found.append("not every survivor stepped again")
        elif mark.next_step_ms is not None and seen.next_step_ms > mark.next_step_ms:
            found.append(f"the next step took {seen.next_step_ms:.0f} ms")
        if mark.failed is not None and seen.failed > mark.failed:
            found.append(f"{seen.failed} steps failed, allowed are {mark.failed}")
        if mark.adopted_ms is not None and self.adopted_ms is None:
            found.append("no other driver took over the job")
        elif mark.adopted_ms is not None and (self.adopted_ms or 0.0) > mark.adopted_ms:
            found.append(f"adoption took {self.adopted_ms:.0f} ms")
        if mark.interrupted is not None and seen.interrupted is not mark.interrupted:
            found.append(f"training was {'' if seen.interrupted else 'not '}interrupted")
        if seen.lost:
            found.append(f"{seen.lost} committed steps were lost")
        return [f"{self.what}: {each}" for each in found]


@dataclass(frozen=True)
class ScenarioOutcome:
    """Result of a scenario. ``broken``: broken invariants of its journal, and other problems."""

    name: str
    measured: Sequence[ScenarioMeasurement] = ()
    lost: int = 0  # commits, according to the journal
    compared: int = 0  # digests of commits, according to the journal
    differing: int = 0
    broken: Sequence[str] = ()
    failed: str = ""  # the reason why it was not completed

    @property
    def troubles(self) -> list[str]:
        found = [each for measured in self.measured for each in measured.troubles]
        if self.lost:
            found.append(f"the journal has {self.lost} committed steps that were lost")
        if self.differing:
            found.append(f"{self.differing} commits differ between workers")
        if not self.compared and not self.failed:
            found.append("no commit was compared between workers")
        found += self.broken
        return found + ([self.failed] if self.failed else [])

    @property
    def passed(self) -> bool:
        return not self.troubles


HEAD = (
    "scenario",
    "what happened",
    "survivors",
    "next step after",
    "longest pause",
    "failed steps",
    "committed steps lost",
    "adopted after",
    "invariants",
)


def rows(outcome: ScenarioOutcome) -> list[list[str]]:
    """Return the cells of the table: a row for each fault."""
    verdict = "hold" if outcome.passed else "**FAILED**, see below"
    found = []
    for measured in outcome.measured:
        seen = measured.aftermath
        found.append(
            [
                outcome.name,
                measured.what,
                str(seen.survivors),
                _ms(seen.next_step_ms) if seen.interrupted else "not interrupted",
                _ms(seen.pause_ms),
                str(seen.failed),
                str(seen.lost + outcome.lost),
                _ms(measured.adopted_ms),
                verdict,
            ]
        )
    return found or [[outcome.name, *["-"] * (len(HEAD) - 2), verdict]]


def table(outcomes: Sequence[ScenarioOutcome]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [row for outcome in outcomes for row in rows(outcome)]
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    return lines + [f"| {' | '.join(row)} |" for row in cells]


def page(
    outcomes: Sequence[ScenarioOutcome], *, command: str, date: str, machine: str, setting: str
) -> str:
    """Return the page. ``setting``: a paragraph about the setup that all scenarios share."""
    passed = sum(outcome.passed for outcome in outcomes)
    troubles = [(o.name, each) for o in outcomes for each in o.troubles]
    lines = [
        "# Host failures in network namespaces",
        "",
        "Look up how long training is interrupted when a host, a network link, an agent, the driver or etcd fails.",
        "",
        f"On {date}, **{passed} of {len(outcomes)} scenarios passed** on a machine with {machine}."
        " This command, run as root, produced the results:",
        "",
        "```",
        command,
        "```",
        "",
        *setting.strip().splitlines(),
        "",
        *table(outcomes),
        "",
        "- *Survivors* is the number of workers that committed steps before and after the event in the same process.",
        "- *Next step after* is the time from the event until the slowest survivor had committed a step in its new",
        "  world. If a host returns, the other hosts keep training until the host is ready.",
        "- *Longest pause* is the longest time between two commits of one survivor after the event.",
        "- *Failed steps* is the number of steps that a survivor had started and repeated.",
        "- *Committed steps lost* is the number of commits on any worker that were newer than the commit from which",
        "  training resumed. The records of the workers and the journal are both counted.",
        "- *Adopted after* is the time from the death of the driver until the next driver had received a report of",
        "  every worker.",
        "- *Invariants* hold if three conditions are met: the journal satisfies `chaos/invariants/invariants.py`, no",
        "  commit was lost, and parameters were equal at every commit that at least two workers reported.",
        "",
    ]
    if troubles:
        lines += ["## Failed checks", ""]
        for name, each in troubles:
            first, *rest = each.splitlines()
            lines += [f"- {name}: {first}", *(f"      {line}" for line in rest)]
        lines.append("")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"
