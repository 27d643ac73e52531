"""Animation of a job as one SVG file: a ring of workers, their losses and joins, and the resulting costs.

Pure: no I/O, no clock.

The animation uses SMIL, which browsers also play in an <img>, so that it works in a README. It contains no script and
loads nothing; its background suits light and dark pages. Every animated attribute has a static initial value, so a
viewer without SMIL support shows the first frame. The time of the job passes at a constant speed, except that events
too short to see, such as a recovery of 60 ms, are shown for a minimum time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape as escaped

from elastic.driver.monitoring.explain.job_history import Incident, JobHistory
from elastic.driver.monitoring.explain.loss_causes import Cause
from elastic.driver.monitoring.explain.sentences import milliseconds
from elastic.driver.monitoring.explain.timeline_rows import STATES, Span, WorkerRows
from elastic.driver.monitoring.stalls import Stall

WIDTH, HEIGHT = 860, 400
RING = (188.0, 196.0, 128.0)  # center (x, y) and radius of the ring
SEEN_S = 0.45  # minimum time for which a change is shown, in seconds of the animation
WORKERS = 128  # maximum number of slots in the ring
PULSES = 24  # maximum number of workers for which each loss is drawn as an expanding circle
CAPTIONS = 250
FRAMES = 120  # maximum number of changes of each counter
KEYS = 5000  # maximum number of colour changes in the animation, for all workers together
# Colours of the animation. Its dark background suits both light and dark pages.
COLOURS = {
    "starting": "#3f6299",
    "joining": "#5b95f0",
    "training": "#3fae74",
    "recovering": "#f08238",
    "frozen": "#a781ea",
    "standby": "#56aab6",
    "leaving": "#8591a0",
    "done": "#5f6b7a",
    "lost": "#ea5a61",
    "waiting": "#e0a92e",
    "stalled": "#ea5a61",
    "": "#202733",  # colour of an empty slot
}
# Characters that XML does not allow, even as character references.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
BACK, LINE, TEXT, FAINT, BAD = "#10141a", "#2c3542", "#e6eaf0", "#9aa6b6", "#ea5a61"


@dataclass(frozen=True)
class FilmCut:
    """Interval of a job that an animation shows.

    Args:
        begins: start of the interval, in seconds on the journal's clock.
        ends: end of the interval, on the same clock.
        film_s: length of the animation, in seconds.
        gap: changes that are closer than this fraction of the animation's length are merged.
    """

    begins: float
    ends: float
    film_s: float
    gap: float = 0.0  # fraction of the animation's length below which changes are merged

    def share(self, at: float) -> float:
        """Return the position of a time in the interval, from 0 (start) to 1 (end)."""
        return min(1.0, max(0.0, (at - self.begins) / max(1e-9, self.ends - self.begins)))

    def seen(self) -> float:
        """Return the minimum visible duration of an element, as a fraction of the animation's length."""
        return SEEN_S / self.film_s


def film(story: JobHistory, rows: WorkerRows, *, film_s: float = 40.0, title: str = "") -> str:
    """Render the animation of a job as the text of an SVG file.

    Args:
        story: history of the job.
        rows: activity of its slots.
        film_s: length of the animation in seconds, after which it repeats.
        title: title of the animation.
    """
    began = story.began or 0.0
    begins = began if story.trained_at is None else story.trained_at
    gap = max(1e-5, min(len(rows.rows), WORKERS) / KEYS)
    cut = FilmCut(begins, max(_ends(story, rows, begins), begins + 1e-3), film_s, gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>{_escape(title or 'A job, its workers and their losses')}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="{BACK}" stroke="{LINE}"/>',
        *_ring(rows, cut, story.spent.stalls.past),
        *_counters(story, rows, cut),
        *_captions(story, cut),
        *_curve(rows, cut),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return escaped(NOT_XML.sub("\ufffd", text))


def _ends(story: JobHistory, rows: WorkerRows, begins: float) -> float:
    end = story.end_at or story.last
    lost = [at for at, _, _ in rows.deaths if at <= end]
    return min(end, lost[-1] + 0.12 * (lost[-1] - begins) + 1.0) if lost else end


# ---- moving ---------------------------------------------------------------------------------------------------------

Key = tuple[float, str]


def _kept(keys: Sequence[Key], cut: FilmCut) -> list[Key]:
    kept: list[Key] = []
    for at, value in keys:
        at = min(max(at, 0.0), 1.0)
        if kept and kept[-1][1] == value:
            continue
        if kept and at - kept[-1][0] <= cut.gap:
            kept[-1] = (kept[-1][0], value)
        else:
            kept.append((at, value))
    return kept


def _steps(attribute: str, keys: Sequence[Key], cut: FilmCut) -> str:
    kept = _kept(keys, cut)
    if len(kept) == 1:
        return f'<set attributeName="{attribute}" to="{kept[0][1]}"/>'
    return _animate(attribute, kept, cut, "discrete")


def _animate(attribute: str, keys: Sequence[Key], cut: FilmCut, mode: str) -> str:
    values = ";".join(value for _, value in keys)
    times = ";".join(f"{at:.5f}".rstrip("0").rstrip(".") for at, _ in keys)
    return (
        f'<animate attributeName="{attribute}" calcMode="{mode}" dur="{cut.film_s:g}s" repeatCount="indefinite"'
        f' values="{values}" keyTimes="{times}"/>'
    )


# ---- the ring -------------------------------------------------------------------------------------------------------


def _ring(rows: WorkerRows, cut: FilmCut, stalls: Iterable[Stall]) -> list[str]:
    table = rows.table(cut.ends, stalls)
    names = sorted(table, key=_in_order)
    shown = names[:WORKERS]
    middle_x, middle_y, radius = RING
    size = max(3.0, min(17.0, 0.42 * 2 * math.pi * radius / max(1, len(shown))))
    parts = [
        f'<circle cx="{middle_x:g}" cy="{middle_y:g}" r="{radius:g}" fill="none" stroke="{LINE}" stroke-width="2"/>'
    ]
    for index, name in enumerate(shown):
        angle = 2 * math.pi * index / len(shown) - math.pi / 2
        x, y = middle_x + radius * math.cos(angle), middle_y + radius * math.sin(angle)
        fills, halos = _states(table[name], cut), _losses(rows, name, cut)
        parts.append(f'<g transform="translate({x:.1f} {y:.1f})">')
        if halos:
            parts.append(
                f'<circle r="{size:.1f}" fill="none" opacity="0" stroke="{BAD}" stroke-width="3">'
            )
            parts.append(_steps("opacity", _on_off(halos, cut), cut))
            if len(shown) <= PULSES:
                parts.append(_pulse("r", halos, size, 2.1 * size, cut))
            parts.append("</circle>")
        parts.append(
            f'<circle r="{size:.1f}" fill="{_kept(fills, cut)[0][1]}" stroke="{LINE}">'
            f"{_steps('fill', fills, cut)}</circle>"
        )
        if size >= 12:
            parts.append(
                f'<text y="4" text-anchor="middle" font-size="12" font-weight="600" fill="{BACK}">{index}</text>'
            )
        parts.append("</g>")
    if len(names) > len(shown):
        more = len(names) - len(shown)
        parts.append(_text(middle_x, 388, f"and {more} more", FAINT, 12, "middle"))
    return parts


def _in_order(row: str) -> tuple[str, int]:
    host, _, slot = row.rpartition(":")
    return host, int(slot)


def _states(spans: Sequence[Span], cut: FilmCut) -> list[Key]:
    keys: list[Key] = [(0.0, COLOURS[""])]
    seen = cut.seen()
    for start, end, state, *_ in sorted(spans, key=lambda span: span[0]):
        if end < cut.begins or start > cut.ends:
            continue
        name = STATES[int(state)]
        at, until = cut.share(start), cut.share(end)
        if name == "recovering":
            until = max(until, at + seen)
        if at < keys[-1][0]:  # Show the previous state for at least the minimum time.
            if name == "training" and until <= keys[-1][0]:
                continue
            at = keys[-1][0]
        keys.append((at, COLOURS[name]))
        keys.append((max(until, at), COLOURS[""]))
    return keys


def _losses(rows: WorkerRows, name: str, cut: FilmCut) -> list[float]:
    return [
        cut.share(at) for at, row, _ in rows.deaths if row == name and cut.begins <= at <= cut.ends
    ]


def _on_off(times: Sequence[float], cut: FilmCut) -> list[Key]:
    keys: list[Key] = [(0.0, "0")]
    for at in times:
        keys += [(at, "1"), (min(1.0, at + 1.6 * cut.seen()), "0")]
    return keys


def _pulse(attribute: str, times: Sequence[float], low: float, high: float, cut: FilmCut) -> str:
    keys: list[tuple[float, float]] = [(0.0, low)]
    length = 1.6 * cut.seen()
    for at in times:
        if at <= keys[-1][0] or at + length >= 1.0:
            continue
        keys += [(at, low), (at + length, high), (min(1.0, at + length + 1e-4), low)]
    keys.append((1.0, low))
    ordered = [(at, f"{value:.1f}") for at, value in keys]
    return _animate(attribute, ordered, cut, "linear")


# ---- counters -------------------------------------------------------------------------------------------------------


def _counters(story: JobHistory, rows: WorkerRows, cut: FilmCut) -> list[str]:
    middle_x, middle_y, _ = RING
    commits = story.commits.points
    deaths = [at for at, _, _ in rows.deaths]
    took = [(each.at, each.recovered_ms) for each in story.incidents if each.recovered_ms]
    return [
        *_counter(middle_x, middle_y + 6, 44, lambda at: str(_size(rows, at)), cut, "middle"),
        _text(middle_x, middle_y + 30, "workers train", FAINT, 13, "middle"),
        *_labelled(390, "time", lambda at: _clock(at - cut.begins), cut),
        *_labelled(478, "commits", lambda at: f"{_latest(commits, at):,.0f}", cut),
        *_labelled(600, "workers lost", lambda at: str(sum(each <= at for each in deaths)), cut),
        *_labelled(
            725, "longest pause", lambda at: _worst([ms for when, ms in took if when <= at]), cut
        ),
    ]


def _labelled(x: float, label: str, value: Callable[[float], str], cut: FilmCut) -> list[str]:
    return [_text(x, 52, label, FAINT, 13), *_counter(x, 84, 26, value, cut)]


def _counter(
    x: float,
    y: float,
    size: int,
    value: Callable[[float], str],
    cut: FilmCut,
    anchor: str = "start",
) -> list[str]:
    frames: list[tuple[float, str]] = []
    for index in range(FRAMES + 1):
        share = index / FRAMES
        text = value(cut.begins + share * (cut.ends - cut.begins))
        if not frames or frames[-1][1] != text:
            frames.append((share, text))
    return _shown_in_turn(x, y, size, frames, cut, anchor, TEXT)


def _shown_in_turn(
    x: float,
    y: float,
    size: int,
    frames: Sequence[tuple[float, str]],
    cut: FilmCut,
    anchor: str,
    colour: str,
) -> list[str]:
    parts = [f'<g font-size="{size}" font-weight="600" fill="{colour}" text-anchor="{anchor}">']
    for index, (begin, text) in enumerate(frames):
        end = frames[index + 1][0] if index + 1 < len(frames) else 1.0
        keys = [(0.0, "inline" if begin <= 0 else "none"), (begin, "inline"), (end, "none")]
        if end >= 1.0:
            keys.pop()
        moving = _steps("display", keys, cut) if len(frames) > 1 else ""
        hidden = "" if begin <= 0 else ' display="none"'
        parts.append(f'<text x="{x:g}" y="{y:g}"{hidden}>{_escape(text)}{moving}</text>')
    return [*parts, "</g>"]


def _size(rows: WorkerRows, at: float) -> int:
    found = 0
    for when, size, _ in rows.worlds:
        if when > at:
            break
        found = size
    return found


def _latest(points: Sequence[tuple[float, float]], at: float) -> float:
    found = 0.0
    for when, value in points:
        if when > at:
            break
        found = value
    return found


def _worst(took: Sequence[float]) -> str:
    return milliseconds(max(took)) if took else "-"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02}"


# ---- captions and the curve -----------------------------------------------------------------------------------------

_CAPTIONS = {
    Cause.SIGNAL: "was killed",
    Cause.OUT_OF_MEMORY: "ran out of memory",
    Cause.EXCEPTION: "raised an exception",
    Cause.FROZEN: "froze",
    Cause.STUCK: "was stuck",
    Cause.HOST_LOST: "was lost with its host",
    Cause.CUT_OFF: "was cut off",
    Cause.GPU_ERROR: "lost its GPU",
    Cause.DISCONNECTED: "lost its connection",
}


def _captions(story: JobHistory, cut: FilmCut) -> list[str]:
    losses = [(cut.share(each.at), _caption(each)) for each in story.incidents if each.first]
    frames = [(0.0, "all workers train")]
    losses = [each for each in losses if 0.0 < each[0] < 1.0]
    frames += losses[:: 1 + len(losses) // CAPTIONS]
    return _shown_in_turn(390, 128, 15, frames, cut, "start", "#ffd479")


def _caption(incident: Incident) -> str:
    first = incident.first
    assert first is not None
    count = len([each for each in incident.deaths if each.cause is not Cause.LOST_PEER])
    name = f"rank {first.rank}" if first.rank is not None else str(first.worker)
    what = f"{name} {_CAPTIONS.get(first.cause, first.cause.value)}"
    if count > 1:
        what += f", and {count - 1} more"
    if incident.recovered_ms is None or not incident.size_after:
        return what
    noun = "worker trains" if incident.size_after == 1 else "workers train"
    return f"{what}: {incident.size_after} {noun} again {milliseconds(incident.recovered_ms)} later"


def _curve(rows: WorkerRows, cut: FilmCut) -> list[str]:
    left, right, top, bottom = 390.0, WIDTH - 30.0, 176.0, 344.0
    most = max([1, *(size for _, size, _ in rows.worlds)])

    def x(at: float) -> float:
        return left + cut.share(at) * (right - left)

    def y(size: float) -> float:
        return bottom - size / most * (bottom - top)

    parts = [_text(left, top - 14, "workers in the world", FAINT, 13)]
    for size in sorted({0, most, most // 2}):
        parts.append(
            f'<path d="M{left:g} {y(size):.1f}H{right:g}" stroke="{LINE}"/>'
            + _text(left - 8, y(size) + 4, str(size), FAINT, 12, "end")
        )
    path, height = "", y(_size(rows, cut.begins))
    path = f"M{left:.1f} {bottom:.1f}V{height:.1f}"
    before = left
    for at, size, _ in rows.worlds:
        if cut.begins < at < cut.ends and x(at) - before >= 0.4:
            before = x(at)
            path += f"H{before:.1f}V{y(size):.1f}"
    path += f"H{right:.1f}V{bottom:.1f}Z"
    parts.append(f'<path d="{path}" fill="{COLOURS["training"]}" opacity=".45"/>')
    lost = [at for at, _, _ in rows.deaths if cut.begins <= at <= cut.ends]
    ticks = "".join(
        f"M{at:.1f} {bottom + 4:.1f}v9" for at in sorted({round(x(at), 1) for at in lost})
    )
    if ticks:
        parts.append(f'<path d="{ticks}" stroke="{BAD}" stroke-width="2"/>')
    parts.append(_text(left, bottom + 30, "each mark is a lost worker", FAINT, 12))
    line = _animate("x1", [(0.0, f"{left:g}"), (1.0, f"{right:g}")], cut, "linear")
    parts.append(
        f'<line x1="{left:g}" x2="{left:g}" y1="{top - 6:g}" y2="{bottom + 13:g}" stroke="{TEXT}" stroke-width="1.5">'
        f"{line}{line.replace('x1', 'x2')}</line>"
    )
    return parts


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{_escape(text)}</text>'
