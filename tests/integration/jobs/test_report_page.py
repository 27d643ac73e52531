"""The report of a job in a real browser: its cards are whole, and its film opens by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.driver.monitoring.explain.findings import JournalState, findings
from elastic.driver.monitoring.explain.page import PageJob, page
from elastic.driver.monitoring.explain.reported_series import ReportedSeries
from elastic.driver.monitoring.explain.story import Story
from elastic.driver.monitoring.explain.worker_rows import WorkerRows
from harness.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]
REPORTS = 200
CUT = "[...document.querySelectorAll('.tile *')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"


def report_in(folder: Path) -> str:
    """The link to a report with four curves over 20 s."""
    story, reported = Story(), ReportedSeries()
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
    text = page(PageJob(story, WorkerRows(), found, "python train.py", 900.0, reported))
    (folder / "report.html").write_text(text)
    return (folder / "report.html").as_uri()


async def test_no_card_of_the_report_is_cut(tmp_path):
    async with Browser() as browser:
        for width in (1280, 400):
            await browser.open(report_in(tmp_path), width=width)
            await browser.until("document.querySelectorAll('.tile').length > 4")
            assert await browser.look(f"{CUT}.length") == 0
            assert await browser.look("document.documentElement.scrollWidth") <= width
            await browser.picture(tmp_path / f"report-{width}.png")
        assert browser.errors == []
