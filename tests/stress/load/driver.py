"""A real driver as a process, for agents that connect by themselves: see `agents`.

    python -m stress.load.driver FLAGS OF elasticrun

It is elasticrun with two changes that thousands of hosts on one machine require: it resolves no host names and starts
no agents.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from elastic.driver.commandline import cli
from elastic.driver.job import start_multi_host
from elastic.driver.job.start import start
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.network.host_lists import ThisHost


class NoopStarter:
    """Replacement of ssh: the expected agents connect by themselves."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def start(self, bootstrap: Bootstrap) -> None:
        pass

    async def close(self) -> None:
        pass


def _elsewhere(name: str) -> list[str]:
    return ["192.0.2.1"]  # any other machine; nothing is ever sent there


def main(arguments: Sequence[str]) -> int:
    vars(start_multi_host)["SshStarter"] = NoopStarter
    environ = dict(os.environ)
    this_host = ThisHost(resolve=_elsewhere)
    job = cli.make_job(cli.read_options(arguments, environ), environ, this_host=this_host)
    outcome = asyncio.run(start(job, this_host=this_host))
    return outcome.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
