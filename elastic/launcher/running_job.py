"""`Job`: control of a running job from Python, like ``elasticrun status``, ``scale``, ``drain`` and similar."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from elastic.errors import RequestRefused


class Job:
    """Handle of a running job, selected by the same options as for ``elasticrun status``.

    - On this machine: ``name`` is the name of the job or the process ID of its driver. It may be omitted if only one
    job runs.
    - Through etcd: ``etcd``, ``name`` and ``secret_file``.
    - On a Ray cluster: ``ray=True`` and the ``name`` of a detached job.

    No connection is kept open between calls. Each call returns within half a minute.

    Raises:
        Invalid: no such job exists, or several do and none was selected.
        RequestRefused: (an ElasticError) the job refused the request. The message gives the reason.
        ElasticError: the driver cannot be reached.
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
        """Select the job without connecting to it.

        Args:
            name: name of the job, or process ID of its driver as text.
            journal: path of the job's journal.
            etcd: etcd endpoints, ``HOST:PORT`` separated by commas.
            secret_file: path of the job's secret.
            ray: whether ``name`` is a detached job on Ray.
            flags: further flags of ``elasticrun status``, for example for TLS.
        """
        given = {"--job": name, "--journal": journal, "--etcd": etcd, "--secret-file": secret_file}
        words = [f"{flag}={value}" for flag, value in given.items() if value]
        words += ["--ray"] if ray else []
        from elastic.driver.commandline.running_jobs.job_commands import found_job

        found = found_job([*words, *flags], os.environ)
        self.name: str = found.name
        self._found: Any = found

    def status(self) -> dict[str, Any]:
        """Return the contents of the job's live page as a dict with the keys ``set``, ``rows`` and ``add``.

        See docs/commands.md.
        """
        from elastic.driver.job.operator_api.messages import AskStatus

        state: dict[str, Any] = json.loads(self._ask(AskStatus)[1])
        return state

    def scale(self, workers: int) -> str:
        """Request a different number of workers, without waiting for the change. `status` shows the actual number.

        Args:
            workers: requested number of workers.

        Returns:
            A description of the expected outcome.
        """
        from elastic.driver.job.operator_api.messages import AskScale

        return self._ask(AskScale, workers)[0]

    def drain(self, host: str, *, off: bool = False) -> str:
        """Drain a host: start no new workers on it, and remove its workers if enough workers remain on other hosts.

        Args:
            host: name of the host.
            off: whether to end the drain, so that workers may be started on the host again.

        Returns:
            A description of the expected outcome.
        """
        from elastic.driver.job.operator_api.messages import AskDrain

        return self._ask(AskDrain, host, off)[0]

    def remove(self, worker: int | str) -> str:
        """Remove a worker at its next commit, without waiting for the commit.

        Args:
            worker: rank, or ``"host:slot"``.

        Returns:
            A description of the expected outcome.
        """
        from elastic.driver.job.operator_api.messages import AskRemove

        return self._ask(AskRemove, str(worker))[0]

    def stacks(
        self, worker: int | str | None = None, *, all_threads: bool = False
    ) -> dict[str, str]:
        """Return Python stacks of one worker, or of the first eight ranks.

        Args:
            worker: rank, or ``"host:slot"``. None means the first eight ranks.
            all_threads: whether to also return the stacks of the other Python threads, each with a header.

        Returns:
            A dict from the worker's name, ``"host:slot#start"``, to the stack of the thread that called ``init()``. The
            stack starts with ``Training thread``.
        """
        from elastic.driver.job.operator_api.messages import AskStacks

        name = "" if worker is None else str(worker)
        data = self._ask(AskStacks, name, False, all_threads)[1]
        stacks: dict[str, str] = json.loads(data)
        return stacks

    def logs(self, worker: int | str | None = None) -> list[tuple[float, str, str, str]]:
        """Return the last 500 lines of the job's log and output.

        Args:
            worker: rank or ``"host:slot"`` whose lines to return. None means all workers and the driver.

        Returns:
            For each line, the time in seconds since 1970, the level or stream, the worker, and the text. The worker is
            empty for lines of the driver.
        """
        from elastic.driver.job.operator_api.messages import AskLogs

        _, lines = json.loads(self._ask(AskLogs, "" if worker is None else str(worker))[1])
        return [(at, level, source, text) for at, level, source, text in lines]

    def stop(self) -> str:
        """Stop the job, like SIGTERM to its driver. A second call stops it immediately.

        Returns:
            A description of the expected outcome.
        """
        from elastic.driver.job.operator_api.messages import AskStop

        return self._ask(AskStop)[0]

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def _ask(self, kind: type[Any], *arguments: Any) -> tuple[str, str]:
        from elastic.driver.job.operator_api.client import JobClient

        with JobClient(self._found) as client:
            answer = client.ask(kind, *arguments)
        if not answer.done:
            raise RequestRefused(f"job {self.name} rejected the request: {answer.text}")
        return answer.text, answer.data
