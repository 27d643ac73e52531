"""One rank delays the others: the page, status, metrics, explain and the report show which one, at which line and
for how long, while it lasts and afterwards. The truth is when the worker began to hold them up, and when it was let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import wording
from harness.browser import CHROMIUM, Browser
from harness.history import SCRIPTS, STAY_AWAY, pid_of
from harness.job import Job, elasticrun
from harness.ports import free_port
from harness.program import stdout_of
from harness.stalls import debugged

pytestmark = pytest.mark.forked

NAME, SLOT, WITHIN_S = "stalling", 1, 1.0
STALLING = ["python", SCRIPTS / "stalling.py"]
Culprits = list[tuple[int, str]]  # ranks, and the file in which each is


@dataclass
class Stalled:
    """A job of three of which one holds the others up until ``go``."""

    training: Job
    metrics: int

    @property
    def began(self) -> float:
        return (self.training.folder / f"stalls.{SLOT}").stat().st_mtime

    @property
    def link(self) -> str:
        [link] = re.findall(wording.PAGE_JOB, self.training.output)
        return str(link)

    def lasts(self, seconds: float) -> None:
        """Until the line is known, and so long has passed."""
        self.training.until(self.located, "the line of who is waited for", 60)
        self.training.until(lambda: time.time() - self.began >= seconds, f"{seconds:g} s", 90)

    def located(self) -> bool:
        found = self.training.events("WorkerLocated")
        return any(each["worker"][1] == SLOT and each["line"] for each in found)

    def rank(self) -> int:
        workers = [member["worker"] for member in self.training.worlds()[-1]["members"]]
        return [worker[1] for worker in workers].index(SLOT)

    def goes_on(self) -> float:
        """Return when it was released, once the others have reported that they wait no longer."""
        before = len(self.training.events("WorkerProgressed"))
        at = time.time()
        (self.training.folder / "go").touch()

        def over() -> bool:
            said = self.training.events("WorkerProgressed")[before:]
            return any(not each["inside"] for each in said)

        self.training.until(over, "the end of the wait", 30)
        return at

    # ---- what each of them tells: ranks with their lines, and seconds

    def status(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(stdout_of(elasticrun(), "status", NAME, "--json"))
        return state

    def page(self) -> dict[str, Any]:
        """The first thing that a browser is sent."""
        token = {"Authorization": f"Bearer {urlsplit(self.link).fragment}"}
        to = urlsplit(self.link)._replace(path="/events", fragment="").geturl()
        with urllib.request.urlopen(urllib.request.Request(to, headers=token), timeout=10) as told:
            lines = iter(told.readline, b"")
            data = next(line for line in lines if line.startswith(b"data: "))
        state: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
        return state

    def samples(self) -> dict[str, list[Any]]:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.metrics}/metrics", timeout=10
        ) as answer:
            told = text_string_to_metric_families(answer.read().decode())
            return {each.name: each.samples for each in told}

    def explain(self) -> dict[str, list[dict[str, Any]]]:
        """Facts by the kind of their finding; the page is written as well."""
        words = [elasticrun(), "explain", "--json", "--html", "live.html", self.training.journal]
        said = stdout_of(*words, cwd=self.training.folder)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for each in json.loads(said)["findings"]:
            found[each["what"]].append(each["facts"])
        return found


def of_facts(facts: dict[str, Any]) -> Culprits:
    return [(each["rank"], each["line"].partition(":")[0]) for each in facts["culprits"]]


def of_samples(samples: list[Any]) -> Culprits:
    return [(int(each.labels["rank"]), each.labels["line"].partition(":")[0]) for each in samples]


def embedded(report: Path) -> dict[str, Any]:
    """The data of the timeline in a report."""
    pattern = r'<script type="application/json" id="data">(.*)</script>'
    [data] = re.findall(pattern, report.read_text())
    found: dict[str, Any] = json.loads(data)
    return found


@pytest.fixture
def stalled(job, tmp_path, monkeypatch):
    """Begins one, by ``how`` of the script; it ends by itself at the file ``end``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no other job is found there

    def begin(how: str = "work", flags: str = "--idle-timeout 600 --busy-timeout 600") -> Stalled:
        port = free_port()
        surfaces = f"--job {NAME} --metrics-port {port} --dashboard :0 --report report.html"
        rule = f"slot={SLOT},step=30,place=forward,how={how},file=go"
        env = {"STALL": rule, "XDG_RUNTIME_DIR": str(tmp_path), "ENDS": "end", "PACE": "0.05"}
        training = job(f"-np 3 --min-np 1 {STAY_AWAY} {flags} {surfaces}", STALLING, env=env)
        training.until((training.folder / f"stalls.{SLOT}").exists, "a stall", 60)
        return Stalled(training, port)

    return begin


def check_live(it: Stalled, file: str) -> Culprits:
    """All of them tell the culprit, where it is, and the true seconds within WITHIN_S each."""
    rank = it.rank()
    culprits = [(rank, file)]
    values = {}
    for name, ask in (
        ("page", lambda: it.page()["set"]["stall"]),
        ("status", lambda: it.status()["set"]["stall"]),
        ("explain", lambda: it.explain()["stalls now"][0]),
    ):
        facts, asked_at = ask(), time.time()
        values[name] = of_facts(facts), facts["seconds"], asked_at - it.began
    found = it.samples()
    [sample] = found["elastic_stall_seconds"]
    values["metrics"] = of_samples([sample]), sample.value, time.time() - it.began
    assert found["elastic_commits_per_second"][0].value == 0.0
    [[begin, until, _]] = embedded(it.training.folder / "live.html")["stalls"]
    written_at = (it.training.folder / "live.html").stat().st_mtime
    values["report"] = culprits, until - begin, written_at - it.began
    for name, (whom, seconds, true_s) in values.items():
        assert whom == culprits, (name, values)
        # Asking takes a while, on a machine that has other things to do.
        assert true_s - WITHIN_S - 1.0 < seconds < true_s + WITHIN_S, (name, values)
    state = it.page()
    states = {row["rank"]: row["state"] for row in state["rows"]["workers"].values()}
    assert states == {each: "stalled" if each == rank else "waiting" for each in range(3)}
    assert state["set"]["rate"] == 0.0
    return culprits


def check_over(it: Stalled, culprits: Culprits, true_s: float, end: str) -> None:
    """While the job runs, and after its end."""
    told = {
        "page": it.page()["add"]["stalls"],
        "status": it.status()["add"]["stalls"],
        "explain": it.explain()["stall"],
    }
    for name, stalls in told.items():
        assert [(of_facts(each), each["end"]) for each in stalls] == [(culprits, end)], name
        assert stalls[0]["seconds"] == pytest.approx(true_s, abs=WITHIN_S), name
    [last] = it.samples()["elastic_last_stall_seconds"]
    assert of_samples([last]) == culprits
    assert last.value == pytest.approx(true_s, abs=WITHIN_S)
    (it.training.folder / "end").touch()
    it.training.succeed()
    found = it.explain()
    [facts], [spent] = found["stall"], found["time"]
    assert of_facts(facts) == culprits and facts["end"] == end
    assert spent["job"]["stalled"] == pytest.approx(true_s, abs=WITHIN_S)
    assert spent["workers"]["stalled"] == pytest.approx(3 * true_s, abs=3 * WITHIN_S)
    data = embedded(it.training.folder / "report.html")
    [[begin, until, _]] = data["stalls"]
    assert until - begin == pytest.approx(true_s, abs=WITHIN_S)
    red = [
        span for span in data["rows"][f"localhost:{SLOT}"] if data["states"][span[2]] == "stalled"
    ]
    assert sum(span[1] - span[0] for span in red) == pytest.approx(true_s, abs=WITHIN_S)
    assert f"{culprits[0][1]}:" in (it.training.folder / "report.html").read_text()


SOURCE = (SCRIPTS / "stalling.py").read_text().splitlines()
FUNCTIONS = [number for number, line in enumerate(SOURCE, start=1) if line.startswith("def ")]
LOOP = next(
    range(first, until)
    for first, until in itertools.pairwise(FUNCTIONS)
    if SOURCE[first - 1].startswith("def works(")
)
LONG = pytest.param(40.0, marks=pytest.mark.nightly)


@pytest.mark.parametrize("seconds", [7.0, LONG])
def test_endless_loop_and_its_end_are_shown_on_all_surfaces(stalled, seconds):
    it = stalled()
    it.lasts(seconds)
    culprits = check_live(it, "stalling.py")
    [culprit] = it.page()["set"]["stall"]["culprits"]
    assert int(culprit["line"].partition(":")[2]) in LOOP
    over_at = it.goes_on()
    check_over(it, culprits, over_at - it.began, "resumed")


@pytest.mark.nightly
def test_stall_ended_by_a_kill_is_shown_with_its_end(stalled):
    it = stalled(flags="--idle-timeout 600 --busy-timeout 40")
    it.lasts(30.0)
    culprits = check_live(it, "stalling.py")
    it.training.wait_for_action("KillWorker", 60)
    [killed_at] = [
        record["at"]
        for record in it.training.records()
        if any(each["type"] == "KillWorker" for each in record.get("actions") or [])
    ]
    offset = time.time() - time.monotonic()
    check_over(it, culprits, killed_at + offset - it.began, "killed")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["pause", "write", "debugger", "sigstop"])
def test_slow_data_slow_disk_debugger_and_stopped_process_are_attributed(stalled, how):
    lease = " --lease 60" if how == "sigstop" else ""
    it = stalled("write" if how == "write" else "pause", f"--idle-timeout 600{lease}")
    with contextlib.ExitStack() as stack:
        if how == "sigstop":
            stack.enter_context(stopped(pid_of(it.training, SLOT)))
        elif how == "debugger":
            stack.enter_context(debugged(pid_of(it.training, SLOT)))
        else:
            it.lasts(7.0)
        it.training.until(lambda: time.time() - it.began >= 8.0, "eight seconds")
        held = how in ("debugger", "sigstop")
        # One that can't run says where it is once it can.
        told = "stalling.py" if how == "write" else "training.py"
        check_live(it, "" if held else told)
    if held:
        it.training.until(it.located, "its answer", 30)
    check_over(it, [(it.rank(), told)], it.goes_on() - it.began, "resumed")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- in a real browser ----------------------------------------------------------------------------------------------

CELL = "document.querySelector('.cell[data-key=\"localhost:{}\"]')"


@pytest.mark.nightly
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_page_in_a_browser_shows_a_stall_of_40_s_and_its_end(stalled, tmp_path):
    it = stalled()
    it.training.until(it.located, "the line of who is waited for", 60)
    asyncio.run(looked_at(it, tmp_path))
    (it.training.folder / "end").touch()
    it.training.succeed()


async def looked_at(it: Stalled, folder: Path) -> None:
    rank = await asyncio.to_thread(it.rank)
    async with Browser() as browser:
        await browser.open(it.link)
        await browser.until("!document.getElementById('stall').hidden")
        while time.time() - it.began < 40.0:
            await asyncio.sleep(0.2)
        told, true_s = (
            await browser.look("document.getElementById('stall').textContent"),
            time.time(),
        )
        [(shown_s, line)] = re.findall(r"for ([\d.]+) s: .* at (stalling\.py):\d+", told)
        assert float(shown_s) == pytest.approx(true_s - it.began, abs=WITHIN_S)
        assert f"rank {rank} " in told
        colours = [
            await browser.look(f"getComputedStyle({CELL.format(slot)}).backgroundColor")
            for slot in range(3)
        ]
        states = [await browser.look(f"{CELL.format(slot)}.dataset.state") for slot in range(3)]
        assert states == ["stalled" if slot == SLOT else "waiting" for slot in range(3)]
        assert colours[SLOT] == "rgb(200, 50, 58)" and colours[0] == colours[2] != colours[SLOT]
        for slot in (0, 2):
            assert f"rank {rank}" in await browser.look(f"{CELL.format(slot)}.textContent")
        assert f"{line}:" in await browser.look(f"{CELL.format(SLOT)}.title")
        assert await browser.look("document.querySelector('#s-speed h2 b').textContent") == "0"
        last = "document.querySelector('#s-speed path:last-child').getAttribute('d')"
        assert (await browser.look(last)).endswith("L1000.0 94.0")  # down, up to now
        assert await browser.look("document.getElementById('phase').textContent") == "stalled"
        legend = "[...document.querySelectorAll('#parts-legend span')].map(e => e.textContent)"
        assert any(each.startswith("stalled ") for each in await browser.look(legend))
        await browser.picture(folder / "stalled.png")
        over_at = await asyncio.to_thread(it.goes_on)
        await browser.until("document.getElementById('stall').hidden")
        cells = "[...document.querySelectorAll('#stalls td')].map(e => e.textContent)"
        _, seconds, who, _ = await browser.until(f"{cells}.length && {cells}")
        assert float(seconds.split()[0]) == pytest.approx(over_at - it.began, abs=WITHIN_S)
        assert f" at {line}:" in who
        await browser.until(f"{CELL.format(SLOT)}.dataset.state === 'training'")
        await browser.until("Number(document.querySelector('#s-speed h2 b').textContent) > 0")
        await browser.picture(folder / "over.png")
        assert browser.errors == []
