"""Writes one self-contained HTML page about a run: what was learnt, and what happened to the workers meanwhile.

    python examples/report.py out          # reads out/metrics.jsonl and out/journal.jsonl, writes out/report.html

No scripts, no fonts, nothing loaded from elsewhere: inline SVG, drawn by the few lines in `Panel`.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from run import Happening, Point, Run

WIDTH, LEFT, RIGHT = 940, 52, 14  # of every panel, in SVG units


@dataclass
class Panel:
    """One plot over the time of the run: its own scale upwards, the common one to the right."""

    title: str
    height: float
    seconds: float
    low: float
    high: float

    def x(self, at: float) -> float:
        share = min(max(at / self.seconds, 0.0), 1.0) if self.seconds else 0.0
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return 22 + (1 - share) * (self.height - 44)

    def line(self, points: Sequence[Point], style: str) -> str:
        path = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)
        return f'<polyline class="{style}" points="{path}"/>'

    def area(self, points: Sequence[Point]) -> str:
        floor = self.y(self.low)
        path = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)
        first, last = self.x(points[0][0]), self.x(points[-1][0])
        return f'<polygon class="area" points="{first:.1f},{floor} {path} {last:.1f},{floor}"/>'

    def mark(self, each: Happening, named: bool = False) -> str:
        """A line through the panel, with its text when the pointer rests on it."""
        x = self.x(each.at)
        # What is killed comes back within seconds: their names stand on either side.
        aside = (
            f'x="{x - 8:.1f}" text-anchor="end"' if each.kind == "killed" else f'x="{x + 8:.1f}"'
        )
        name = f'<text {aside} y="24">{each.kind}</text>' if named else ""
        return (
            f'<g class="mark {each.kind}"><title>{escape(each.text)}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{self.height - 22}"/>'
            f'<circle cx="{x:.1f}" cy="20" r="4"/>{name}</g>'
        )

    def draw(
        self, inside: Iterable[str], ticks: Sequence[float], label: Callable[[float], str]
    ) -> str:
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" aria-label="{escape(self.title)}">',
            f'<text class="title" x="{LEFT}" y="12">{escape(self.title)}</text>',
        ]
        for value in ticks:
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(f'<text class="up" x="{LEFT - 7}" y="{y + 4:.1f}">{label(value)}</text>')
        for at in steady(0.0, self.seconds, 8):
            parts.append(
                f'<text class="along" x="{self.x(at):.1f}" y="{self.height - 5:.0f}">{at:g} s</text>'
            )
        return "\n".join([*parts, *inside, "</svg>"])


def steady(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high, not many more than asked for."""
    rough = max(high - low, 1e-9) / about
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [n * size for n in range(math.ceil(low / size), math.floor(high / size) + 1)]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of each point and those around it."""
    half = window // 2
    return [
        (at, statistics.fmean(value for _, value in points[max(0, n - half) : n + half + 1]))
        for n, (at, _) in enumerate(points)
    ]


def stairs(points: Sequence[Point], end: float) -> list[Point]:
    """Each value holds until the next."""
    corners: list[Point] = []
    for (at, value), (until, _) in zip(points, [*points[1:], (end, 0.0)], strict=True):
        corners += [(at, value), (max(at, until), value)]
    return corners


def plots(run: Run) -> str:
    loss = [(line["at"], line["loss"]) for line in run.steps]
    speed = [(line["at"], line["tokens_per_s"] / 1e3) for line in run.steps]
    # A recovery is told in the table: in the plot it would lie on the kill that it answers, milliseconds before.
    marks = [each for each in run.happenings if each.kind != "recovered"]
    low = max(0.0, min(value for _, value in loss) - 0.2)
    high = max(value for _, value in loss) + 0.1
    panel = Panel("loss, nats per byte", 300, run.seconds, low, high)
    first = panel.draw(
        [
            panel.line(loss, "faint"),
            panel.line(smooth(loss, 25), "bold"),
            *(panel.mark(each, named=True) for each in marks),
        ],
        steady(low, high, 6),
        lambda value: f"{value:g}",
    )
    most = max(size for _, size in run.sizes)
    panel = Panel("workers in the world", 130, run.seconds, 0, most + 0.5)
    corners = stairs(run.sizes, run.seconds)
    second = panel.draw(
        [panel.area(corners), panel.line(corners, "bold"), *map(panel.mark, marks)],
        [float(n) for n in range(int(most) + 1)],
        lambda value: f"{value:.0f}",
    )
    top = 1.1 * max(value for _, value in smooth(speed, 9))
    panel = Panel("thousand tokens per second", 150, run.seconds, 0, top)
    third = panel.draw(
        [panel.line(smooth(speed, 9), "bold"), *map(panel.mark, marks)],
        steady(0, top, 4),
        lambda value: f"{value:g}",
    )
    return first + second + third


STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --page: #f6f7f9; --card: #fff; --rule: #e4e7ec;
        --blue: #3056d3; --red: #d92d20; --amber: #d98a00; --green: #12915a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #98a1b3; --page: #12151c; --card: #1a1f29;
        --rule: #2b3240; --blue: #7d9bff; --red: #ff6b5e; --amber: #ffb547; --green: #46d198; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 36px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 16px; margin: 0 0 10px; }
p { margin: 0 0 20px; color: var(--soft); }
section, .tile { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 12px 16px; }
section { padding: 18px 20px; margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px; }
.tile b { display: block; font-size: 20px; white-space: nowrap; letter-spacing: -.02em; }
.tile span { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; margin-bottom: 8px; overflow: visible; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-weight: 600; fill: var(--ink); font-size: 12px; }
svg .up { text-anchor: end; } svg .along { text-anchor: middle; }
.grid { stroke: var(--rule); }
polyline { fill: none; stroke: var(--blue); stroke-linejoin: round; }
.bold { stroke-width: 2; } .faint { stroke-width: 1; opacity: .3; }
.area { fill: var(--blue); opacity: .12; }
.mark text { stroke: none; fill: currentColor; font-weight: 600; }
.mark line { stroke-dasharray: 3 3; }
.killed { stroke: var(--red); fill: var(--red); color: var(--red); }
.recovered { stroke: var(--amber); fill: var(--amber); color: var(--amber); }
.joined, .changed { stroke: var(--green); fill: var(--green); color: var(--green); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 7px 10px 7px 0; border-top: 1px solid var(--rule); vertical-align: top; }
th { border: 0; color: var(--soft); font-weight: 500; font-size: 13px; }
td:first-child { white-space: nowrap; }
td:last-child, th:last-child { text-align: right; padding-right: 0; white-space: nowrap; }
td b { font-weight: 600; }
pre { margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; }
"""


def page(run: Run) -> str:
    """The whole page."""
    late, early = run.loss(late=True), run.loss(late=False)
    tiles = [
        (f"{len(run.steps):,}", f"steps in {run.seconds:.0f} s"),
        (f"{early:.2f} → {late:.2f}", "training loss"),
        ("-" if run.validation_loss is None else f"{run.validation_loss:.2f}", "validation loss"),
        (f"{run.tokens_per_s:,.0f}", "tokens per second"),
        (
            f"{len(run.of_kind('killed'))} / {len(run.of_kind('joined'))}",
            "killed / joined",
        ),
        (f"{run.steps_lost}", "committed steps lost"),
    ]
    rows = [
        f'<tr><td>{each.at:.1f} s</td><td class="{each.kind}"><b>{each.kind}</b></td>'
        f"<td>{escape(each.text)}</td><td>{pause(each)}</td></tr>"
        for each in run.happenings
    ]
    tops = [f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles]
    sample = (
        f"<section><h2>What it writes</h2><pre>{escape(run.sample)}</pre></section>"
        if run.sample
        else ""
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>hvd-elastic: a training run</title><style>{STYLE}</style></head><body><main>
<h1>A small GPT, trained while workers came and went</h1>
<p>Python's standard library, byte by byte. The surviving processes were never restarted.</p>
<div class="tiles">{"".join(tops)}</div>
<section>{plots(run)}</section>
<section><h2>What happened</h2><table>
<tr><th>when</th><th>what</th><th></th><th>steps paused for</th></tr>
{"".join(rows) or "<tr><td colspan=4>Nothing: the world stayed as it was.</td></tr>"}</table></section>
{sample}
</main></body></html>
"""


def pause(each: Happening) -> str:
    return "" if each.pause_ms is None else f"{each.pause_ms:.0f} ms"


def write(folder: Path) -> Path:
    """Writes the page beside the files it was made from."""
    file = folder / "report.html"
    file.write_text(page(Run.load(folder)), encoding="utf-8")
    return file


if __name__ == "__main__":
    print(write(Path(sys.argv[1] if len(sys.argv) > 1 else "out")))
