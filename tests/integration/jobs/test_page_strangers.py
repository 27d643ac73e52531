"""Unauthenticated viewers at the live page of a job: they see nothing, and do nothing."""

from __future__ import annotations

import asyncio
import re
import socket
import textwrap
from urllib.parse import urlsplit

import pytest

import elastic
from harness import wording
from harness.browser import CHROMIUM, Browser

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(180)]

EVIL = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
)
CROWD = 1000
SCRIPT = f"""
    import os, time
    import torch
    import elastic

    elastic.init()

    @elastic.run
    def train(state):
        while True:
            elastic.allreduce(torch.ones(1000), name="x")
            state.step += 1
            if elastic.rank() == 0:
                with open("steps", "a") as steps:
                    steps.write(f"{{state.step}} {{time.monotonic()}}\\n")
            if state.step % 50 == 0:
                print({EVIL!r}, flush=True)
                elastic.report({{{EVIL!r}: 1.5, "loss": 0.25}})
            state.commit()
            time.sleep(0.01)
            if elastic.allreduce(torch.tensor([float(os.path.exists("end"))]), name="end").item():
                return

    train(elastic.ObjectState(step=0))
"""


def answer(link: str, *lines: str, path: str = "/events", method: str = "GET") -> bytes:
    """Return all that a caller with these headers receives; of an endless answer the beginning."""
    to = urlsplit(link)
    asked = [f"{method} {path} HTTP/1.1", *lines]
    if not any(line.startswith("Host:") for line in lines):
        asked.append(f"Host: {to.netloc}")
    with socket.create_connection((to.hostname, to.port or 80), 10) as caller:
        caller.sendall("\r\n".join([*asked, "", ""]).encode())
        told = b""
        while len(told) < 4096 and (data := caller.recv(4096)):
            told += data
        return told


def test_unauthenticated_viewers_see_no_data_and_training_continues(job, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    flags = "-np 2 --min-np 1 --dashboard :0"
    training = job(flags, ["python", script], env={"XDG_RUNTIME_DIR": str(tmp_path)})
    steps = training.folder / "steps"

    def made() -> int:
        return len(steps.read_text().splitlines()) if steps.exists() else 0

    training.until(lambda: made() > 100, "a hundred steps", 60)
    [link] = re.findall(wording.PAGE_JOB, training.output)
    mine = f"Authorization: Bearer {urlsplit(link).fragment}"
    assert b"event: full" in answer(link, mine) and b"taken" in answer(link, mine)

    for lines in (
        [],
        ["Authorization: Bearer "],
        ["Authorization: Bearer 00000000000000000000000000000000"],
        [mine, "Origin: http://evil.example"],
        [mine, "Sec-Fetch-Site: cross-site"],
        [mine, "Host: evil.example"],
        [mine, f"Host: 127.0.0.1.evil.example:{urlsplit(link).port}"],
        [mine, "Host: localhost", "Host: evil.example"],
    ):
        told = answer(link, *lines)
        assert told.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), (lines, told)
        assert b"train" not in told and b"taken" not in told
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert answer(link, mine, method=method).startswith(b"HTTP/1.1 405")
    assert b"taken" not in answer(link, path="/")

    before, crowd = made(), []
    try:
        for _ in range(CROWD):
            to = urlsplit(link)
            crowd.append(socket.create_connection((to.hostname, to.port or 80), 10))
            crowd[-1].sendall(b"GET /events HTTP/1.1\r\nHost: ")
        assert b"event: full" in answer(link, mine)  # who belongs here comes in
        assert elastic.Job().status()["set"]["job"]["phase"] == "training"
        training.until(lambda: made() > before + 50, "steps in the crowd", 60)
    finally:
        for caller in crowd:
            caller.close()
    if CHROMIUM:
        asyncio.run(looked_at(link))
    (training.folder / "end").touch()
    training.succeed()
    assert training.actions("BreakWorld") == []
    numbers = [int(line.split()[0]) for line in steps.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1)), "every step once"


async def looked_at(link: str) -> None:
    async with Browser() as browser:
        await browser.open(link)
        await browser.until("document.body.textContent.includes('onerror')")
        assert not await browser.look("document.querySelectorAll('img').length")
        assert await browser.look("document.title") != "taken"
        assert browser.errors == []
        await browser.open(link.partition("#")[0])
        await browser.until(
            "document.getElementById('trouble').textContent.includes('use the link')"
        )
        assert not await browser.look("document.body.textContent.includes('onerror')")
