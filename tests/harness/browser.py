"""A headless Chromium, controlled through its DevTools protocol: returns a page as a picture and as text.

async with Browser() as browser:
    await browser.open("http://127.0.0.1:8080/", width=400, height=800, dark=True)
    await browser.until("document.title.includes('training')")
    await browser.picture(Path("page.png"))
    assert not browser.errors
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
START_S, ANSWER_S = 30.0, 60.0


class Browser:
    """One page. ``errors``: errors of its console, and exceptions of its script."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Browser:
        home = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={home}", "--remote-debugging-port=0", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-dev-shm-usage"]
        self._process = await asyncio.create_subprocess_exec(
            *(CHROMIUM, *flags, "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._stack.push_async_callback(self._end)
        told = home / "DevToolsActivePort"
        for _ in range(int(START_S / 0.05)):
            if told.exists() and told.read_text().count("\n"):
                break
            await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        pages: list[dict[str, str]] = []
        while not pages:
            answer = await asyncio.to_thread(
                urllib.request.urlopen, f"http://127.0.0.1:{port}/json/list"
            )
            pages = [each for each in json.load(answer) if each["type"] == "page"]
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._socket = await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._socket.close()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        await self._stack.aclose()

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.sleep(0.3)  # its children write into its folder until they have exited

    async def open(
        self, link: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=link)

    async def look(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout: float = 20.0) -> Any:
        """Wait until an expression is true."""
        for _ in range(int(timeout / 0.02)):
            look = f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
            if value := await self.look(look):
                return value
            await asyncio.sleep(0.02)
        raise AssertionError(f"{expression} was not true within {timeout} s; {self.errors}")

    async def picture(self, path: Path) -> None:
        """Return a PNG of the whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(future, ANSWER_S)

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                future = self._answers.pop(told["id"])
                if not future.cancelled():
                    future.set_result(told.get("result", told))
                continue
            about = told.get("params", {})
            match told["method"]:
                case "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(about["exceptionDetails"])[:500])
                case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                    self.errors.append(json.dumps(about["args"])[:500])
                case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                    self.errors.append(json.dumps(about["entry"])[:500])
