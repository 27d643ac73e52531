"""Results of a soak, shown on a terminal and as a page of the documentation."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.chaos.inject import terminal_report
from elastic.chaos.inject.plan import KINDS
from elastic.chaos.inject.report import Report, percentiles
from stress.soak.growth import GrowthCurve

DRIVER = "driver"
BACK_S = 60.0  # time for all workers to be back after the last fault


@dataclass
class SoakResults:
    """Measurements of the soak besides the job's report. ``left``: processes and segments that outlived the job."""

    curves: list[GrowthCurve]
    back_s: float | None = None  # seconds from the last fault until all workers trained again
    left: list[str] = field(default_factory=list)

    @property
    def troubles(self) -> list[str]:
        """Failed checks, as sentences."""
        failed = [
            f"{curve.quantity.called} of {curve.who} grew by {curve.growth:.1f}"
            f" {curve.quantity.unit} in the second half; allowed are {curve.allowed:.1f}"
            for curve in self.curves
            if not curve.flat
        ]
        spared = {curve.who for curve in self.curves} - {DRIVER}
        if len(spared) != 1:
            failed.append(
                f"the spared worker was lost: it was {', '.join(sorted(spared)) or 'none'}"
            )
        if self.back_s is None:
            failed.append(f"not all workers were back {BACK_S:g} s after the last fault")
        return failed + [f"left behind: {each}" for each in self.left]


def show(found: SoakResults, console: Console) -> None:
    """Print the curves and the failed checks."""
    if not console.is_terminal:
        console.width = terminal_report.WIDTH
    console.print(_curves(found.curves))
    if found.back_s is not None:
        console.print(f"all workers were back {found.back_s:.1f} s after the last fault")
    for trouble in found.troubles:
        console.print(Text(trouble, style="red"))


def _curves(curves: list[GrowthCurve]) -> Table:
    table = Table(
        title="what must not grow",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("of", "", "first", "last", "least", "most", "grew", "allowed", "", ""):
        numbers = name not in ("of", "")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in rows(curves):
        table.add_row(*row)
    return table


def rows(curves: list[GrowthCurve]) -> list[list[str]]:
    """Return the cells of a table with one row per curve."""
    found = []
    for curve in curves:
        values = curve.values
        digits = 1 if curve.quantity.unit else 0
        numbers = [values[0], values[-1], min(values), max(values)]
        unit = f" ({curve.quantity.unit})" if curve.quantity.unit else ""
        found.append(
            [
                curve.who,
                f"{curve.quantity.called}{unit}",
                *(f"{number:.{digits}f}" for number in numbers),
                f"{curve.growth:+.1f}",
                f"{curve.allowed:.1f}",
                "flat" if curve.flat else "GROWS",
                curve.sparkline(),
            ]
        )
    return found


def page(command: str, report: Report, found: SoakResults, *, passed: bool) -> str:
    """Return a page of the documentation about this run. ``command`` repeats it."""
    steps, goodput = report.steps, report.goodput
    kinds = {kind: sum(fate.what.startswith(kind) for fate in report.faults) for kind in KINDS}
    faults = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    failures = [r.total_ms for r in report.recoveries if r.kind == "recovery"]
    changes = [r.total_ms for r in report.recoveries if r.kind == "change"]
    machine = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    lines = [
        "# Soak test",
        "",
        "Check whether memory, sockets, file descriptors or threads of a job grow during long training under faults.",
        "",
        f"On {time.strftime('%Y-%m-%d')}, the soak test **{'passed' if passed else 'failed'}** on a machine with"
        f" {machine}, Python {platform.python_version()}. This command ran the test:",
        "",
        "```",
        command,
        "```",
        "",
        "The job trains a small model on one machine, with a commit after every step. The test injects faults at random"
        " times, and lost workers are replaced. One worker is exempt from faults, so its curves cover the whole job.",
        "",
        "| result | value |",
        "|---|---|",
        f"| faults | {len(report.faults)}: {faults} |",
        f"| recoveries after a failure | {_spread(failures)} |",
        f"| planned changes | {_spread(changes)} |",
        f"| commits lost | {steps.lost} of {steps.kept + steps.lost} |",
        f"| commits that differed between workers | {report.digests.differing} of {report.digests.compared} |",
        f"| share of the time spent training | {goodput.share:.1%} |",
        f"| share of the time spent training with all {goodput.workers} workers | {goodput.full_share:.1%} |",
        f"| invariants | {'; '.join(report.broken) or 'all hold'} |",
        f"| all workers back after the last fault | {_seconds(found.back_s)} |",
        f"| processes and memory segments left behind | {', '.join(found.left) or 'nothing'} |",
        "",
        "## Resource usage",
        "",
        "The columns *first*, *last*, *least* and *most* show the usage during the run. The column *grew* shows the"
        " growth over the second half of the run, which is the median of the slopes between all pairs of samples. Each"
        " sample is relative to the usual value for its world size, because sockets, descriptors and threads vary with"
        " the size of the world.",
        "",
        "| process | resource | first | last | least | most | grew | allowed | result | curve |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows(found.curves)),
        "",
    ]
    if found.troubles:
        lines += ["## Failed checks", "", *(f"- {trouble}" for trouble in found.troubles), ""]
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p90, worst = percentiles(values)
    return f"{len(values)}: p50 {p50:.0f} ms, p90 {p90:.0f}, max {worst:.0f}"


def _seconds(value: float | None) -> str:
    return "no" if value is None else f"{value:.1f} s"
