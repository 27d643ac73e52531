"""Report on one job as an HTML page: findings, timeline and reported values. The page is self-contained.

Text from the job is escaped in the HTML and in the JSON that the page's script reads. A content security policy in the
page's head also blocks all other scripts and all network requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from elastic.driver.monitoring.explain.findings import FindingKind, JobFinding, time_facts
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.sentences import (
    GOODPUT,
    HEADINGS,
    duration,
    number,
    parts_meant,
    sections,
)
from elastic.driver.monitoring.explain.timeline_rows import STATES, WorkerRows
from elastic.driver.monitoring.reported_series import ReportedSeries
from elastic.driver.monitoring.stalls import as_sentence
from elastic.driver.monitoring.time_accounting import WORDS

COLOURS = {
    "training": "training",
    "stalled": "waiting",
    "committing": "standby",
    "data": "starting",
    "storage": "joining",
    "recovering": "recovering",
    "joining": "frozen",
    "lost": "lost",
    "idle": "done",
    "starting": "frozen",
    "changing": "joining",
    "ending": "done",
}


@dataclass(frozen=True)
class PageJob:
    """Data shown on a report page.

    Args:
        offset: seconds to add to the times of the history to obtain seconds since 1970, or None if unknown.
    """

    story: JobHistory
    rows: WorkerRows
    findings: Sequence[JobFinding]
    command: str = ""
    offset: float | None = None
    reported: ReportedSeries | None = None


def page(job: PageJob) -> str:
    """Render the report page as the text of an HTML file."""
    script = _text("../charts.js") + _text("report.js")
    grouped = sections(job.findings)
    began = job.story.began or 0.0
    title = _title(grouped, job.command)
    return Template(_text("report.html")).substitute(
        TITLE=escape(title),
        CHARTS_STYLE=_text("../charts.css"),
        BODY="\n".join(_body(job, grouped, title)),
        DATA=_embedded(_data(job, began)),
        SCRIPT=script,
        SCRIPT_HASH="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """Encode a value as JSON for embedding in an HTML element. The result cannot close the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(job: PageJob, began: float) -> dict[str, Any]:
    rows, end = job.rows, job.story.last
    stalls = [*job.story.spent.stalls.past, *filter(None, [job.story.spent.stall])]
    return {
        "seconds": round(end - began, 3),
        "states": STATES,
        "rows": {
            row: [[round(a - began, 3), round(b - began, 3), *more] for a, b, *more in spans]
            for row, spans in sorted(
                rows.table(end, stalls).items(), key=lambda each: _in_order(each[0])
            )
        },
        "worlds": [[round(at - began, 3), size, number] for at, size, number in rows.worlds],
        "recoveries": [
            [round(a - began, 3), round(b - began, 3), number, kind]
            for a, b, number, kind in rows.recoveries
        ],
        "deaths": [[round(at - began, 3), row, code] for at, row, code in rows.deaths],
        "stalls": [
            [round(each.since - began, 3), round(each.until - began, 3), as_sentence(each.facts())]
            for each in stalls
        ],
        "series": _series(job, began),
    }


def _in_order(row: str) -> tuple[str, int]:
    host, _, slot = row.rpartition(":")
    return host, int(slot)


def _series(job: PageJob, began: float) -> dict[str, list[tuple[float, float]]]:
    if job.reported is None or job.offset is None:
        return {}
    since = job.offset + began
    return {
        name: [(round(at - since, 3), value) for at, value in series.points]
        for name, series in job.reported.shown().items()
        if len(series.points) > 1
    }


# ---- contents -------------------------------------------------------------------------------------------------------

Sections = Mapping[str, Sequence[tuple[JobFinding, str]]]


def _title(grouped: Sections, command: str) -> str:
    first = grouped["ended"][0][1] if grouped["ended"] else "A job"
    return first.removesuffix(".")


def _body(job: PageJob, grouped: Sections, title: str) -> Iterable[str]:
    well = any(finding.what is FindingKind.DONE for finding, _ in grouped["ended"])
    failed = any(finding.what is FindingKind.FAILED for finding, _ in grouped["ended"])
    kind = "good" if well else "bad" if failed else ""
    yield f'<section class="{kind}"><h1>{escape(title)}</h1>'
    for _, text in grouped["ended"][1:]:
        yield f"<p>{escape(text)}</p>"
    yield f'<p class="faint">{escape(_about(job))}</p></section>'
    yield from _list("advice", grouped)
    for _, text in grouped["trace"]:
        head, _, trace = text.partition("\n")
        yield f"<section><h2>{HEADINGS['trace']}</h2><p>{escape(head)}</p><pre>{escape(trace)}</pre></section>"
    yield from _tiles(job)
    yield from _timeline(job)
    yield from _reported(job)
    yield from _list("course", grouped)
    yield from _list("lost", grouped)
    yield from _cost(job, grouped)
    yield from _list("file", grouped)


def _about(job: PageJob) -> str:
    parts = []
    if job.offset is not None and job.story.began is not None:
        began = time.localtime(job.offset + job.story.began)
        parts.append(f"Started {time.strftime('%Y-%m-%d %H:%M:%S %z', began)}")
    if job.command:
        parts.append(job.command)
    return "  ·  ".join(parts)


def _list(name: str, grouped: Sections) -> Iterable[str]:
    if grouped[name]:
        items = "".join(f"<li>{escape(text)}</li>" for _, text in grouped[name])
        yield f"<section><h2>{HEADINGS[name]}</h2><ul>{items}</ul></section>"


def _tiles(job: PageJob) -> Iterable[str]:
    story, reported = job.story, job.reported
    own: list[tuple[str, str]] = []
    if reported is not None and reported.steps:
        own.append((f"{reported.steps:,}", "steps"))
        own.append((f"{reported.again:,}", "steps repeated"))
    joined = max(0, story.view.started - story.largest)
    own.append((f"{len(story.losses())} / {joined}", "workers lost / restarted or joined"))
    mean = story.rates.steps.mean()
    if mean is not None:
        own.append((f"{mean:.3g}", "steps per second"))
    facts = time_facts(story)
    if facts["job"]["stalled"]:
        own.append((f"{facts['job']['stalled']:.1f} s", "stalled"))
    if facts["goodput"] is not None:
        own.append((f"{facts['goodput']:.3f}", "goodput"))
    taken = {name for _, name in own}
    values: list[tuple[str, str]] = []
    for name, series in reported.shown().items() if reported is not None else ():
        ends = [series.last] if series.count == 1 else [series.first, series.last]
        label = f"{name} (reported)" if name in taken else name
        values.append((" → ".join(map(number, ends)), label))
    tiles = (
        [*own[:1], *values, *own[1:]] if reported is not None and reported.steps else values + own
    )
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    yield f'<div class="tiles">{cells}</div>'


def _timeline(job: PageJob) -> Iterable[str]:
    if not job.rows.rows:
        return
    key = "".join(f'<span><i style="background:var(--{s})"></i>{s}</span>' for s in STATES)
    left_out = f" {job.rows.left_out} later spans are omitted." if job.rows.left_out else ""
    yield (
        '<section><h2>Timeline</h2><div class="tools"><button id="in">zoom in</button><button id="out">zoom'
        ' out</button><button id="left">◀</button><button id="right">▶</button><button id="all">all</button><span'
        ' class="faint" id="range"></span></div><div id="scroll"><canvas id="timeline" tabindex="0" role="img"'
        ' aria-label="one row per slot, with the activity of its workers over time"></canvas></div><div id="under"'
        f' class="faint"></div><div class="key">{key}</div><p class="faint">Wheel: zoom. Drag, or Shift and'
        f" wheel: scroll. A red mark is a lost worker.{left_out}</p><noscript>The timeline requires"
        " JavaScript.</noscript></section>"
    )


def _reported(job: PageJob) -> Iterable[str]:
    reported = job.reported
    if reported is None or not (reported.series or reported.texts):
        yield '<div id="charts" hidden></div>'
        return
    yield '<section><h2>Reported values</h2><div id="charts"></div>'
    for name, text in reported.texts.items():
        yield f'<p class="faint">{escape(name)}</p><pre>{escape(text)}</pre>'
    yield "</section>"


def _cost(job: PageJob, grouped: Sections) -> Iterable[str]:
    if job.story.began is None:
        return
    facts = time_facts(job.story)
    words: dict[str, str] = {stretch: text for stretch, text in WORDS.items()}
    yield f"<section><h2>{HEADINGS['cost']}</h2>"
    for finding, text in grouped["cost"]:
        if finding.what is not FindingKind.TIME:
            yield f"<p>{escape(text)}</p>"
    yield from _bar(f"The job, {duration(facts['job_s'])}", facts["job"], words)
    yield from _bar(f"All workers, {duration(facts['workers_s'])}", facts["workers"], {})
    if facts["goodput"] is not None:
        yield f'<p class="faint">Goodput {facts["goodput"]:.3f}: {GOODPUT}. {escape(parts_meant(facts))}</p>'
    yield "</section>"


def _bar(name: str, parts: Mapping[str, float], words: Mapping[str, str]) -> Iterable[str]:
    whole = sum(parts.values())
    if not whole:
        return
    shown = {part: seconds for part, seconds in parts.items() if seconds > 0}
    pieces = "".join(
        f'<i style="width:{100 * seconds / whole:.3f}%;background:var(--{COLOURS[part]})"></i>'
        for part, seconds in shown.items()
    )
    key = "".join(
        f'<span><i style="background:var(--{COLOURS[part]})"></i>{words.get(part, part)} {seconds:.2f} s</span>'
        for part, seconds in shown.items()
    )
    yield f'<p>{escape(name)}</p><div class="bar">{pieces}</div><div class="key">{key}</div>'
