"""Formatting of a report for the terminal. This module computes only percentiles."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.chaos.inject.fault_outcomes import FaultOutcome
from elastic.chaos.inject.report import Recovery, Report, percentiles

WIDTH = 118  # width if the output is not a terminal
KINDS = {"recovery": "after a failure", "change": "planned change"}
FAULTS_SHOWN = 40


def show(report: Report, console: Console | None = None) -> None:
    """Print the whole report to standard output."""
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print()
    console.rule("chaos report", align="left")
    if report.faults:
        console.print(_faults(report.faults))
    if len(report.faults) > FAULTS_SHOWN:
        console.print(
            f"the last {FAULTS_SHOWN} of {len(report.faults)} faults are shown; --json FILE writes all of them"
        )
    if report.recoveries:
        console.print(_recoveries(report.recoveries))
    console.print(_verdicts(report))


def _faults(faults: list[FaultOutcome]) -> Table:
    table = _table("faults")
    for name, justify in (("at", "right"), ("fault", "left"), ("worker, rank", "left")):
        table.add_column(name, justify=justify, no_wrap=name != "fault")  # type: ignore[arg-type]
    table.add_column("noticed", justify="right", no_wrap=True)
    table.add_column("back after", justify="right", no_wrap=True)
    table.add_column("outcome")
    for fate in faults[-FAULTS_SHOWN:]:
        table.add_row(
            f"{fate.at_s:.1f} s",
            fate.what,
            f"{fate.worker} ({fate.rank} of {fate.size})",
            _ms(fate.noticed_ms),
            _ms(fate.back_ms),
            Text(fate.outcome),
        )
    return table


def _recoveries(recoveries: list[Recovery]) -> Table:
    table = _table("recoveries, in ms")
    for name in ("", "phase", "times", "p50", "p90", "max"):
        table.add_column(name, justify="left" if name in ("", "phase") else "right")
    for kind, called in KINDS.items():
        those = [r for r in recoveries if r.kind == kind]
        if not those:
            continue
        _row(table, called, "whole", (r.total_ms for r in those), end=False)
        phases = list(dict.fromkeys(name for r in those for name in r.phases_ms))
        for number, name in enumerate(phases, start=1):
            values = (r.phases_ms[name] for r in those if name in r.phases_ms)
            _row(table, "", name, values, end=number == len(phases))
    return table


def _row(table: Table, kind: str, phase: str, values: Iterable[float], *, end: bool) -> None:
    known = list(values)
    p50, p90, worst = (f"{each:.1f}" for each in percentiles(known))
    table.add_row(kind, phase, str(len(known)), p50, p90, worst, end_section=end)


def _verdicts(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    steps, goodput, digests = report.steps, report.goodput, report.digests
    spared = (
        f"; {report.spared} more were drawn, but no worker could be spared" if report.spared else ""
    )
    if not report.trained:
        table.add_row("training", Text("no training was observed: nothing was tested", style="red"))
    table.add_row("faults", f"{len(report.faults)}{spared}")
    if report.planned and len(report.missed) == report.planned:
        text = f"none of the {report.planned} planned faults was injected: nothing was tested"
        table.add_row("", Text(text, style="red"))
    for line in report.missed:
        table.add_row("", Text(line))
    kinds = [sum(r.kind == kind for r in report.recoveries) for kind in KINDS]
    table.add_row("recoveries", f"{kinds[0]} after a failure, {kinds[1]} planned changes")
    table.add_row(
        "commits lost",
        Text(f"{steps.lost} of {steps.kept + steps.lost}", style="red" if steps.lost else "green"),
    )
    for line in steps.lost_at:
        table.add_row("", Text(line))
    table.add_row(
        "done again",
        f"{steps.again_s:.2f} s between the last commits and the failures; {steps.gone} commits were lost with all"
        " workers that held them",
    )
    table.add_row(
        "goodput",
        f"{goodput.share:.1%} of {goodput.total_s:.1f} s training; {goodput.full_share:.1%} with all"
        f" {goodput.workers} workers; {goodput.worker_share:.1%} of the maximum of {goodput.workers} workers;"
        f" {goodput.stalled_s:.1f} s stalled",
    )
    of = "commits" if digests.of_commits else "copies of the state"
    text = f"{digests.compared} {of} compared between workers, {digests.differing} differ"
    table.add_row("replicas", Text(text, style="red" if digests.differing else "green"))
    for line in digests.examples:
        table.add_row("", Text(line))
    table.add_row("invariants", _invariants(report.broken))
    table.add_row("the job", Text(report.ended or f"ended with exit code {report.code}"))
    return table


def _invariants(broken: list[str]) -> Text:
    if not broken:
        return Text("all hold", style="green")
    return Text("; ".join(broken), style="red")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _ms(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1e3:.1f} s"
