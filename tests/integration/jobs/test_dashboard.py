"""The live page in a real browser: 4, 64 and 1,000 workers of a real driver, in light and dark mode, on a phone.

The pictures stay in the folder of the test, to be looked at: pytest --basetemp.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic.driver.events import HostsChanged, ReportRecovery, TimePassed, WorkerExited
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.page_server import PageServer, bound
from elastic.driver.monitoring.dashboard.page_state import TAILS
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.page_access import RequestGuard
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import as_sentence
from elastic.protocol.messages import Worker
from harness.browser import CHROMIUM, Browser
from harness.published import published, starts
from stress.load.agents import Lose, Together
from stress.load.job import LightJob

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]

SHOWN_S = 5.0  # on a machine that has other things to do; benchmarks/dashboard.py measures
LOOKS = [(1280, False), (1280, True), (400, False), (400, True)]
STATES = "[...document.querySelectorAll('.cell')].filter(c => c.dataset.state == '{}').length"


@pytest.mark.parametrize("workers", [4, 64, 1000])
def test_page_shows_events_of_a_running_job_in_a_browser(workers, tmp_path, monkeypatch):
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


HOSTILE = [
    "<img src=x onerror=hit=1>" * 12,  # longer than a line, too
    "</script><script>hit=1</script>",
    '"><svg/onload=hit=1>',
    "' onmouseover=hit=1 '",
    "javascript:hit=1",
    "__proto__",
    "constructor",
    "\u202e\u0000\x1b[2J]]>-->",
]
TOKEN = "f" * 32


async def test_hostile_names_of_hosts_jobs_and_workers_run_no_script_in_the_page():
    everything = " ".join(HOSTILE)
    model = PageModel(TimeSpent(JobView()), name=everything, command=HOSTILE, least=1, most=9)
    workers = [Worker(name, slot) for slot, name in enumerate(HOSTILE)]
    actions = [*starts(*workers), published(1, *workers, reason=as_sentence(everything))]
    model.view.note(HostsChanged(dict.fromkeys(HOSTILE, 9)), actions, 10.0)
    for rank, name in enumerate(HOSTILE):
        model.report(0, {name: float(rank)}, 11.0)
        model.expect_stack(workers[rank], everything, 11.0)
        model.stderr(workers[rank], everything, 11.0)
        model.line("warning", name, everything, 12.0)
    report = ReportRecovery(2, "recovery", as_sentence(everything), 1, 83.0, {HOSTILE[0]: 20.0}, 0)
    model.view.note(TimePassed(), [report], 13.0)
    listening = bound("127.0.0.1", 0)
    link = f"http://127.0.0.1:{listening.getsockname()[1]}/#{TOKEN}"
    server = PageServer(model, listening, RequestGuard(TOKEN), clock=lambda: 20.0)
    await server.open()
    try:
        async with Browser() as browser:
            await browser.open(link)
            await browser.until(f"{STATES.format('training')} == {len(HOSTILE)}")
            shown = await browser.look(
                "[...document.querySelectorAll('#metrics .names input')].map(o => o.value)"
            )
            assert sorted(shown) == sorted(HOSTILE)
            assert await browser.look("document.documentElement.scrollWidth") <= 1280
            for number in range(len(HOSTILE)):
                await browser.look(f"document.querySelectorAll('.cell')[{number}].click()")
            model.view.note(HostsChanged({"constructor": 9}), [], 14.0)
            gone = [WorkerExited(each, 0, "") for each in workers if each.host != "constructor"]
            for each in gone:
                model.view.note(each, [], 15.0)
            model.view.note(HostsChanged({"h": 1}), [], 16.0)
            model.line("info", "", "the last", 17.0)
            server.changed()
            await browser.until("document.body.textContent.includes('the last')")
            assert await browser.look("typeof hit") == "undefined"
            assert (
                await browser.look("document.querySelectorAll('main img, body > img').length") == 0
            )
            assert browser.errors == []
    finally:
        server.close()


async def test_log_tab_of_a_worker_keeps_its_lines_when_other_workers_print_many():
    model = PageModel(TimeSpent(JobView()), name="job", command=["train.py"], least=1, most=9)
    now = [10.0]
    for who, text in (("", "started"), ("0", "quiet"), ("1", "first")):
        model.line("stdout", who, text, now[0])
    listening = bound("127.0.0.1", 0)
    link = f"http://127.0.0.1:{listening.getsockname()[1]}/#{TOKEN}"
    server = PageServer(model, listening, RequestGuard(TOKEN), clock=lambda: now[0])
    await server.open()
    lines = "[...document.querySelectorAll('#lines div')].map(d => d.lastChild.data)"
    tab = "[...document.querySelectorAll('#whose button')].find(b => b.textContent === '{}')"
    try:
        async with Browser() as browser:
            await browser.open(link)
            await browser.until(f"{lines}.length === 3")
            tabs = "[...document.querySelectorAll('#whose button')].map(b => b.textContent)"
            assert await browser.look(tabs) == ["all", "driver", "0", "1"]
            for each in range(3 * TAILS["log"]):
                now[0] += 0.01
                model.line("stdout", "1", f"much {each}", now[0])
                if each % 100 == 99:
                    server.changed()
                    await browser.until(f"{lines}.includes('much {each}')")
            assert "quiet" not in await browser.look(lines)
            await browser.look(f"{tab.format('0')}.click()")
            assert await browser.look(lines) == ["quiet"]
            model.line("stdout", "1", "not here", now[0] + 5)
            model.line("stdout", "0", "here", now[0] + 5)
            server.changed()
            assert await browser.until(f"{lines}.length > 1 && {lines}") == ["quiet", "here"]
            await browser.look(f"{tab.format('driver')}.click()")
            assert await browser.look(lines) == ["started"]
            assert browser.errors == []
    finally:
        server.close()


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
