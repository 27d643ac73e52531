"""Report and live page in a real browser: complete cards; charts with values, log scale and smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.driver.events import HostsChanged, TimePassed, WorkerPaced
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.page_server import PageServer, bound
from elastic.driver.monitoring.explain.animation import film
from elastic.driver.monitoring.explain.findings import JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.report_page import PageJob, page
from elastic.driver.monitoring.explain.timeline_rows import WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.page_access import RequestGuard
from elastic.driver.monitoring.reported_series import ReportedSeries
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.output_interfaces import Usage
from elastic.protocol.messages import Worker
from harness.browser import CHROMIUM, Browser
from harness.published import published, starts

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]
TOKEN = "f" * 32
REPORTS = 200
CUT = "[...document.querySelectorAll('.tile *')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"


def report_in(folder: Path) -> str:
    """The link to a report with four curves over 20 s."""
    story, reported = JobHistory(TimeSpent(JobView())), ReportedSeries()
    story.began, story.last = 100.0, 120.0
    for each in range(REPORTS):
        metrics = {
            "step": each + 1,
            "loss": 100.0 * 0.97**each,
            "tokens_per_s": 5294.3e3 + each,
            "lr": 1e-4 / (each + 1),
            "delta": each - 100.0,
        }
        reported.report(0, metrics, 1000.0 + each / 10)
    found = findings(story, JournalState(None))
    text = page(PageJob(story, WorkerRows(story.view), found, "python train.py", 900.0, reported))
    (folder / "report.html").write_text(text)
    return (folder / "report.html").as_uri()


async def test_cards_of_the_report_fit_the_page_width(tmp_path):
    async with Browser() as browser:
        for width in (1280, 400):
            await browser.open(report_in(tmp_path), width=width)
            await browser.until("document.querySelectorAll('.tile').length > 4")
            assert await browser.look(f"{CUT}.length") == 0
            assert await browser.look("document.documentElement.scrollWidth") <= width
            await browser.picture(tmp_path / f"report-{width}.png")
        assert browser.errors == []


async def test_film_opens_as_a_standalone_svg(tmp_path):
    story = JobHistory(TimeSpent(JobView()))
    rows = WorkerRows(story.view)
    one = Worker("h", 0)
    for at, actions in ((1.0, starts(one)), (2.0, [published(1, one)]), (9.0, [])):
        story.view.note(TimePassed(), actions, at)
    (tmp_path / "film.svg").write_text(film(story, rows, title="a\x1b<b>"))
    async with Browser() as browser:
        await browser.open((tmp_path / "film.svg").as_uri())
        assert await browser.until("document.documentElement.nodeName === 'svg'")
        assert await browser.look("document.querySelector('parsererror')") is None
        assert await browser.look("document.querySelectorAll('text').length") > 5
        assert browser.errors == []


async def test_live_page_names_the_slowest_worker_and_shows_resource_usage(tmp_path):
    model = PageModel(TimeSpent(JobView()), name="job", command=["train.py"], least=1, most=9)
    workers = [Worker("h", slot) for slot in range(3)]
    model.view.note(HostsChanged({"h": 3}), [*starts(*workers), published(1, *workers)], 10.0)
    for worker, waited_s in zip(workers, (20.0, 2.0, 18.0), strict=True):
        model.view.note(WorkerPaced(worker, 1, 600, waited_s, 30.0, commits=300), [], 40.0)
        model.uses(worker, Usage(1.5, 3 << 30, 0.75, 5 << 30), 40.0)
    listening = bound("127.0.0.1", 0)
    link = f"http://127.0.0.1:{listening.getsockname()[1]}/#{TOKEN}"
    server = PageServer(model, listening, RequestGuard(TOKEN), clock=lambda: 50.0)
    await server.open()
    try:
        async with Browser() as browser:
            await browser.open(link)
            cells = "[...document.querySelectorAll('#steps tr')].map(r => [...r.children].map(c => c.textContent))"
            table = await browser.until(f"({cells}).length === 4 && {cells}")
            assert table[1] == [
                "1",
                "h:1",
                "100 ms",
                "93 ms",
                "",
                "150 %",
                "3.00 GiB",
                "75 %",
                "5.00 GiB",
            ]
            assert [each[0] for each in table[2:]] == ["2", "0"]
            assert "rank 1 (h:1)" in await browser.look(
                "document.getElementById('slowest').textContent"
            )
            await browser.open(link, width=400)
            await browser.until(f"({cells}).length === 4")
            assert await browser.look("document.documentElement.scrollWidth") <= 400
            assert browser.errors == []
    finally:
        server.close()


# ---- charts ---------------------------------------------------------------------------------------------------------

FIGURE = "[...document.querySelectorAll('.charts-grid figure')].find(f => f.textContent.startsWith('{} '))"
SHOWN = (
    "[...document.querySelectorAll('.charts-grid figure:not([hidden]) figcaption')]"
    ".map(caption => caption.firstChild.data.trim())"
)
MAIN = f"{FIGURE}.querySelector('path:last-child').getAttribute('d')"
SET = (
    "(e => {{ e.{0} = {1}; e.dispatchEvent(new Event('input', {{bubbles: true}}));"
    " e.dispatchEvent(new Event('change', {{bubbles: true}})) }})(document.querySelector('{2}'))"
)
AVERAGE = (0.9, [1.0, 3.0, float("nan"), 2.0, 2.0])


def tensorboard(weight: float, values: Sequence[float]) -> list[float]:
    """As TensorBoard's line chart computes it, line by line."""
    last, count, found = 0.0, 0, []
    for value in values:
        if math.isfinite(value):
            last = last * weight + (1 - weight) * value
            count += 1
            found.append(last / (1 - math.pow(weight, count)))
        else:
            found.append(value)
    return found


async def pointed_at(browser: Browser, name: str, share: float) -> list[str]:
    """The pointer is above this chart, at this share of its width: what all charts tell."""
    box = f"{FIGURE.format(name)}.querySelector('svg').getBoundingClientRect()"
    await browser.look(f"{FIGURE.format(name)}.scrollIntoView({{block: 'center'}})")
    x = await browser.look(f"{box}.left + {share} * {box}.width")
    y = await browser.look(f"{box}.top + 20")
    await browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tips = (
        "[...document.querySelectorAll('.charts-grid .tip:not([hidden])')].map(t => t.textContent)"
    )
    found: list[str] = await browser.until(f"({tips}).length && {tips}")
    return found


async def looked_at(browser: Browser, names: list[str]) -> None:
    assert sorted(await browser.until(f"({SHOWN}).length && {SHOWN}")) == sorted(names)
    # As an absolute scale has them: 100 * 0.97**50 of the way between the ends.
    told = await pointed_at(browser, "loss", 0.25 * 199 / 200)
    values = [float(each.split("  ")[1].replace(",", "")) for each in told]
    loss = values[names.index("loss")]
    assert len(told) == len(names) and loss == pytest.approx(100 * 0.97**50, rel=0.04)
    await browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    await browser.until("!document.querySelector('.charts-grid .tip:not([hidden])')")
    # On a log scale an exponential is a line, and 100 values of 0 or less have no place.
    before = await browser.look(MAIN.format("loss"))
    await browser.look(SET.format("checked", "true", "input[name=log]"))
    points = [
        tuple(map(float, each.split()))
        for each in (await browser.look(MAIN.format("loss")))[1:].split("L")
    ]
    assert len(points) == REPORTS
    for x, y in points[:: REPORTS // 8]:
        first, last = points[0], points[-1]
        line = first[1] + (last[1] - first[1]) * (x - first[0]) / (last[0] - first[0])
        assert y == pytest.approx(line, abs=0.2)
    assert (await browser.look(MAIN.format("delta"))).count("L") == REPORTS - 101 - 1
    await browser.look(SET.format("checked", "false", "input[name=log]"))
    assert await browser.look(MAIN.format("loss")) == before
    # Smoothed: another line, which begins where the values do, with these behind it.
    await browser.look(SET.format("value", "0.9", "input[name=smoothing]"))
    smooth = await browser.look(MAIN.format("loss"))
    assert smooth != before and smooth.split("L")[0] == before.split("L")[0]
    raw = await browser.look(f"{FIGURE.format('loss')}.querySelector('.raw').getAttribute('d')")
    assert raw == before
    weight, values = AVERAGE
    text = "[" + ", ".join("NaN" if math.isnan(v) else str(v) for v in values) + "]"
    found = await browser.look(
        f"Charts.smoothed({text}, {weight}).map(v => Number.isNaN(v) ? null : v)"
    )
    for value, wanted in zip(found, tensorboard(weight, values), strict=True):
        assert math.isnan(wanted) if value is None else value == pytest.approx(wanted)
    await browser.look(SET.format("value", "0", "input[name=smoothing]"))
    # One of them is not wanted.
    await browser.look("document.querySelector('.names input[value=lr]').click()")
    assert sorted(await browser.look(SHOWN)) == sorted(set(names) - {"lr"})
    await browser.look("document.querySelector('.names input[value=lr]').click()")
    assert browser.errors == []


NAMES = ["loss", "tokens_per_s", "lr", "delta"]


async def test_the_charts_of_the_report_show_values_and_have_a_log_scale_and_smoothing(tmp_path):
    async with Browser() as browser:
        await browser.open(report_in(tmp_path))
        await looked_at(browser, NAMES)
        await browser.picture(tmp_path / "charts.png")


async def test_the_charts_of_the_live_page_show_values_and_have_a_log_scale_and_smoothing(tmp_path):
    model = PageModel(TimeSpent(JobView()), name="job", command=["train.py"], least=1, most=9)
    for each in range(REPORTS):
        metrics = {
            "loss": 100.0 * 0.97**each,
            "tokens_per_s": 5294.3e3 + each,
            "lr": 1e-4 / (each + 1),
            "delta": each - 100.0,
        }
        model.report(0, metrics, 1000.0 + each)
    listening = bound("127.0.0.1", 0)
    link = f"http://127.0.0.1:{listening.getsockname()[1]}/#{TOKEN}"
    server = PageServer(model, listening, RequestGuard(TOKEN), clock=lambda: 1000.0 + REPORTS - 1)
    await server.open()
    try:
        async with Browser() as browser:
            await browser.open(link)
            await browser.until(f"({SHOWN}).length")
            await looked_at(browser, ["loss", "delta", "lr", "tokens_per_s"])
            model.report(0, {"loss": 7.0}, 1300.0)
            server.changed()
            last = f"{FIGURE.format('loss')}.querySelector('figcaption b').textContent"
            await browser.until(f"{last} === '7'")
            await browser.picture(tmp_path / "page.png")
            for width in (1280, 400):
                await browser.open(link, width=width)
                await browser.until(f"({SHOWN}).length")
                assert await browser.look("document.documentElement.scrollWidth") <= width
    finally:
        server.close()
