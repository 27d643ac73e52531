"""A small driver: starts agents on the given hosts, reports it, and waits; Ctrl-C makes it print ``interrupted``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from elastic.driver.launch.ssh import SshOptions, SshStarter
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.launch.starter_by_host import StarterByHost
from elastic.driver.launch.subprocess_starter import ChildStarter


def say(text: str) -> None:
    print(text, flush=True)


async def main() -> None:
    told = json.loads(sys.argv[1])
    python, secret = told["python"], os.environ["ELASTIC_JOB_SECRET"]

    def log(level: str, text: str) -> None:
        say(f"{level}: {text}")

    starter = StarterByHost(
        lambda host: None if host.startswith("here") else "it is another machine",
        here=ChildStarter(environ=os.environ, log=log, python=python),
        there=SshStarter(
            SshOptions(config=told["config"], python=python), environ=os.environ, log=log
        ),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, say, "interrupted")
    starts = (
        starter.start(Bootstrap("trains", host, secret, ["driver:1"], outlives=outlives))
        for host, outlives in told["hosts"].items()
    )
    await asyncio.gather(*starts)
    say("started")
    await asyncio.sleep(100)


asyncio.run(main())
