"""The live page in a real browser: 4, 64 and 1,000 workers of a real driver, in the light, in the dark, on a phone.

The pictures stay in the folder of the test, to be looked at: pytest --basetemp.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic.chaos.load.agents import Lose, Together
from elastic.chaos.load.job import LightJob
from harness.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]

SHOWN_S = 5.0  # on a machine that has other things to do; benchmarks/dashboard.py measures
LOOKS = [(1280, False), (1280, True), (400, False), (400, True)]
STATES = "[...document.querySelectorAll('.cell')].filter(c => c.dataset.state == '{}').length"


@pytest.mark.parametrize("workers", [4, 64, 1000])
def test_the_page_shows_what_happens(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTIC_DASHBOARD", ":0")
    slots = min(8, workers // 2)
    with LightJob(workers, slots, tmp_path) as job:
        job.wait(Together, lambda it: it.size == workers)
        asyncio.run(looked_at(job, job.page_link(), workers, slots, tmp_path))


async def looked_at(job: LightJob, link: str, workers: int, slots: int, folder: Path) -> None:
    async with Browser() as browser:
        await browser.open(link)
        await browser.until(f"{STATES.format('training')} == {workers}")
        job.order(Lose([*job.hosts][1]))
        await browser.until(f"{STATES.format('lost')} == {slots}")
        shown_at = time.monotonic()
        await browser.until(f"document.title.endsWith(', {workers - slots}')")
        assert shown_at - job.lost_at([*job.hosts][1]) < SHOWN_S
        for width, dark in LOOKS:
            await browser.open(link, width=width, height=900, dark=dark)
            await browser.until(f"{STATES.format('training')} == {workers - slots}")
            assert await browser.look("document.documentElement.scrollWidth") <= width
            name = f"{workers}-{width}-{'dark' if dark else 'light'}.png"
            await browser.picture(folder / name)
        assert urlsplit(link).fragment not in await browser.look("document.body.textContent")
        await keys(browser, workers)
        assert browser.errors == []


async def keys(browser: Browser, workers: int) -> None:
    """All of it by keyboard: one cell is in the order of Tab, arrows lead to the others, Enter tells of one."""
    assert await browser.look("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1
    await browser.look("document.querySelector('.cell[tabindex=\"0\"]').focus()")
    for key, code in (("ArrowRight", 39), ("ArrowDown", 40), ("Enter", 13)):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await browser.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )
    box = "document.getElementById('about')"
    about = await browser.until(f"!{box}.hidden && {box}.textContent")
    assert "h" in about and "start 1" in about
    focused = await browser.look("document.activeElement.dataset.key")
    assert focused in about and focused != "h0:0"
