"""The page docs/faults.md from the results of the matrix. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from stress.fault_matrix import cells as faults
from stress.fault_matrix import expectations
from stress.fault_matrix.cells import Cell
from stress.fault_matrix.expectations import ENDS, Result

HEAD = """\
# Fault matrix

Use this page to look up how a job reacts when a process fails at a given point of training. Each cell of the tables is
a real job of 4 workers that commits after every step. A failpoint injects the fault into the victim in the phase of the
row (see `elastic/failpoints`). A cell passes if all of these conditions are met:

- The job ends as the cell's rule in `tests/stress/fault_matrix/expectations.py` requires.
- The parameters of all workers are equal at every commit.
- Every sample is used in every epoch. In phases without the prefix *shard*, W workers may repeat up to W - 1 samples to
  fill the last round of an epoch.
- No process is left running.
- The journal satisfies every invariant in `chaos/invariants/invariants.py`.

The number in a cell is the time in milliseconds, including detection, from the fault until all survivors train again.
The timeouts of these jobs are short (`--lease 0.5 --idle-timeout 2`).

In phases with the prefix *shard*, the job runs another script, which trains a small FSDP2 model with one copy
(`copies=1`) on one host. This script adds checksums of the gathered parameters to its commits, and the test compares
these checksums instead of the parameters of replicas. The script also verifies that every sample is used exactly once
per epoch.

`python -m tests.stress matrix --sharded --jobs 2` ran the shard phases on 2026-11-28, with torch 2.13 (CPU), on a
virtual machine with 2 cores and other load. Worker processes were forked from a process that had imported torch.

`make matrix` writes this page from the latest result of each cell. Do not edit it.
"""


def page(
    results: Mapping[Cell, Result], *, not_here: Callable[[Cell], str] = lambda cell: ""
) -> str:
    """Render the page in Markdown."""
    reasons: list[str] = []
    tables = [_table(victim, results, reasons) for victim in faults.VICTIMS]
    cells = list(faults.all_cells())
    possible = [cell for cell in cells if not faults.impossible(cell)]
    passed = sum(cell in results and results[cell].passed for cell in possible)
    failed = [results[cell] for cell in possible if cell in results and not results[cell].passed]
    missing = [cell for cell in possible if cell not in results]
    parts = [
        HEAD,
        f"{passed} of {len(possible)} cells passed, {len(failed)} failed, {len(missing)} not run."
        f" {len(cells) - len(possible)} cells are not applicable; the last section lists the"
        f" reasons.{_dates(results[c] for c in possible if c in results)}\n",
        "## Outcomes\n",
        _list({end.value: text for end, text in ENDS.items()}),
        "## Faults\n",
        _list(faults.FAULTS),
        "## Phases\n",
        _list(faults.MEANINGS),
        *tables,
        "## Cells that are not applicable\n",
        "\n".join(
            f"{number}. {reason[0].upper()}{reason[1:]}."
            for number, reason in enumerate(reasons, 1)
        )
        + "\n",
    ]
    if failed:
        parts += ["## Failed\n", "\n".join(f"- {r.cell}: {r.said}" for r in failed) + "\n"]
    if missing:
        parts += ["## Not run\n", _missing(missing, not_here)]
    return "\n".join(parts)


def _dates(results: Iterable[Result]) -> str:
    counts = Counter(result.date for result in results if result.date)
    days = (f"{count} on {day}" for day, count in sorted(counts.items()))
    return f"\nThe cells were run on these days: {', '.join(days)}." if counts else ""


def _list(texts: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}**: {text}" for name, text in texts.items()) + "\n"


def _table(victim: str, results: Mapping[Cell, Result], reasons: list[str]) -> str:
    lines = [f"## {victim.capitalize()}\n", f"{faults.VICTIMS[victim].capitalize()}.\n"]
    why = {faults.impossible(Cell(victim, f, p)) for f in faults.FAULTS for p in faults.PHASES}
    if len(why) == 1 and "" not in why:
        return "\n".join([*lines, f"No faults are injected, because {why.pop()}.\n"])
    lines.append("| | " + " | ".join(faults.FAULTS) + " |")
    lines.append("|---" * (1 + len(faults.FAULTS)) + "|")
    for phase in faults.PHASES:
        shown = [_cell(Cell(victim, fault, phase), results, reasons) for fault in faults.FAULTS]
        lines.append(f"| {phase} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _cell(cell: Cell, results: Mapping[Cell, Result], reasons: list[str]) -> str:
    reason = faults.impossible(cell)
    if reason:
        if reason not in reasons:
            reasons.append(reason)
        return f"n/a ({reasons.index(reason) + 1})"
    result = results.get(cell)
    if result is None:
        return "not run"
    if not result.passed:
        return "**FAILED**"
    wanted = expectations.expected(cell)
    fenced = "fenced, " if wanted.fenced else ""
    took = f" {result.ms:.0f}" if result.ms is not None else ""
    return f"{fenced}{wanted.end.value}{took}"


def _missing(cells: list[Cell], not_here: Callable[[Cell], str]) -> str:
    by_reason: dict[str, int] = {}
    for cell in cells:
        reason = not_here(cell) or "not yet: `make matrix` continues where it stopped"
        by_reason[reason] = by_reason.get(reason, 0) + 1
    return "\n".join(f"- {count} cells: {reason}" for reason, count in by_reason.items()) + "\n"
