"""Child processes of a starter, with a shell in place of an agent."""

from __future__ import annotations

import asyncio
import os
from unittest.mock import create_autospec

import psutil

from elastic.driver.launch.child_processes import ChildProcess, ChildProcesses
from elastic.driver.launch.starter import READY, Bootstrap
from elastic.driver.output_interfaces import Log
from elastic.version import __version__

# Exits a moment after its standard input is closed, as an agent that has moved to the background under load.
AGENT = f"read bootstrap; echo {READY} {__version__}; cat > /dev/null; sleep 0.2"


async def not_explained(process: ChildProcess, release: str | None) -> str:
    raise AssertionError(process.last_output())


def test_process_that_has_started_a_spared_agent_is_reaped_when_its_starter_closes():
    async def start_and_close() -> None:
        log = create_autospec(Log, instance=True)
        children = ChildProcesses(
            log, lambda host, process: "", at_once=1, ready_s=20.0, close_s=20.0
        )
        bootstrap = Bootstrap("job", "alpha", "00", drivers=["driver:4000"], outlives=True)
        await children.begin(bootstrap, ["sh", "-c", AGENT], os.environ, not_explained)
        await children.close(spare=True)

    before = {child.pid for child in psutil.Process().children()}
    asyncio.run(start_and_close())
    assert {child.pid for child in psutil.Process().children()} <= before
