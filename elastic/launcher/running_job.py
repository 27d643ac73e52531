"""`Job`: a running job, steered from Python as by ``elasticrun status``, ``scale``, ``drain`` and their like."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from elastic.errors import RequestRefused


class Job:
    """One that runs: on this machine by its name or the process of its driver, or the only one; through etcd by
    ``etcd``, ``name`` and ``secret_file``, as the flags of ``elasticrun status`` have them; with ``ray`` a detached job
    of the Ray cluster by its name.

    Nothing is kept open between calls. They raise Invalid where there is no such job, RequestRefused (an ElasticError)
    with the reason where the job says no, and another ElasticError where its driver can't be asked. Each returns within
    half a minute.
    """

    def __init__(
        self,
        name: str = "",
        *,
        journal: str | None = None,
        etcd: str | None = None,
        secret_file: str | None = None,
        ray: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        """``flags``: further ones of ``elasticrun status``, as for TLS."""
        given = {"--job": name, "--journal": journal, "--etcd": etcd, "--secret-file": secret_file}
        words = [f"{flag}={value}" for flag, value in given.items() if value]
        words += ["--ray"] if ray else []
        from elastic.driver.commandline.steering.job_commands import found_job

        found = found_job([*words, *flags], os.environ)
        self.name: str = found.name
        self._found: Any = found

    def status(self) -> dict[str, Any]:
        """What the live page shows: ``set``, ``rows`` and ``add``; docs/commands.md has what is in them."""
        from elastic.driver.job.steering.messages import AskStatus

        state: dict[str, Any] = json.loads(self._ask(AskStatus)[1])
        return state

    def scale(self, workers: int) -> str:
        """From here on the job wants so many workers. Returns what follows, before it is done; see `status`."""
        from elastic.driver.job.steering.messages import AskScale

        return self._ask(AskScale, workers)[0]

    def drain(self, host: str, *, off: bool = False) -> str:
        """Its workers leave if enough others stay, and nobody is started there; ``off``: may be again."""
        from elastic.driver.job.steering.messages import AskDrain

        return self._ask(AskDrain, host, off)[0]

    def remove(self, worker: int | str) -> str:
        """The worker, a rank or ``"host:slot"``, leaves at its next commit."""
        from elastic.driver.job.steering.messages import AskRemove

        return self._ask(AskRemove, str(worker))[0]

    def stacks(self, worker: int | str | None = None) -> dict[str, str]:
        """The Python stacks of all threads by worker, ``"host:slot#start"``: of one, or of the first eight ranks.

        That of the thread that called ``init()`` begins with ``Training thread``.
        """
        from elastic.driver.job.steering.messages import AskStacks

        data = self._ask(AskStacks, "" if worker is None else str(worker))[1]
        stacks: dict[str, str] = json.loads(data)
        return stacks

    def logs(self, worker: int | str | None = None) -> list[tuple[float, str, str, str]]:
        """The last 500 lines: seconds since 1970, level or stream, who (empty: the driver), text."""
        from elastic.driver.job.steering.messages import AskLogs

        _, lines = json.loads(self._ask(AskLogs, "" if worker is None else str(worker))[1])
        return [(at, level, who, text) for at, level, who, text in lines]

    def stop(self) -> str:
        """The job ends, as at a SIGTERM of its driver; a second time at once."""
        from elastic.driver.job.steering.messages import AskStop

        return self._ask(AskStop)[0]

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def _ask(self, kind: type[Any], *arguments: Any) -> tuple[str, str]:
        from elastic.driver.job.steering.client import JobClient

        with JobClient(self._found) as client:
            told = client.ask(kind, *arguments)
        if not told.done:
            raise RequestRefused(f"job {self.name}: {told.text}")
        return told.text, told.data
