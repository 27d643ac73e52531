"""Server for operators of a running job. Converts their requests to events for membership.

The server listens on loopback, and `runtime_folder` publishes its address. If agents connect from other machines, the
server also listens on the address that the agents use. Connections are authenticated and sealed like any control
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from elastic.driver.events import (
    AnswerRequest,
    DrainRequested,
    Event,
    RemoveRequested,
    ScaleRequested,
)
from elastic.driver.job.operator_api import messages
from elastic.driver.job.operator_api.messages import OperatorAnswer, Request, Told
from elastic.driver.job.operator_api.pending_requests import OperatorRequest, request_text
from elastic.driver.job.operator_api.runtime_folder import JobRecord, PublishedRecord, records
from elastic.driver.journal.entries import readable
from elastic.driver.monitoring.dashboard.live_page import LivePage
from elastic.driver.monitoring.dashboard.page_model import STACKS
from elastic.driver.monitoring.dashboard.page_state import TAILS
from elastic.driver.monitoring.stack_excerpts import training_stack
from elastic.driver.network.blocking_calls import within
from elastic.driver.network.control_server import Callers, ControlServer
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Worker

ANSWER_S = 10.0  # seconds within which membership must decide, which usually takes milliseconds
STACKS_S = 3.0  # seconds within which a worker must write its stack traces
QUIET_S = 0.25  # seconds without another line after which a stack dump is considered complete
# the same two limits for stack traces of all threads, which are written one after another
STACKS_ALL_S, QUIET_ALL_S = 5.0, 1.0
AT_ONCE = 64  # maximum number of concurrent requests
STOP_CODE = 143  # exit code of a job stopped by an operator, equal to that after SIGTERM

OPERATORS: Callers[str] = Callers(
    "operator", messages.from_operator, OperatorAnswer, lambda answer: answer.name
)


Grow = Callable[[int], Awaitable[str]]


def shown(requester: str) -> str:
    """Format the name of a connection for users, without the random part, as in ``ann@gpu1 (process 4242)``."""
    name, _, number = requester.rpartition(":")[0].rpartition(":")
    return f"{name} (process {number})" if name else requester.partition(":")[0]


async def _no_room(workers: int) -> str:
    return ""


class SteerableDriver(Protocol):
    """Interface of a driver that handles operators' requests."""

    def handle_request(self, event: Event) -> None: ...
    def dump(self, worker: Worker, *, all_threads: bool) -> None: ...
    def stop(self, reason: str, code: int = 1) -> None: ...


@dataclass(frozen=True, kw_only=True)
class OperatorAccess:
    """Name of a job, and the key that authenticates its operators."""

    name: str
    key: bytes
    command: Sequence[str]
    journal: str
    environ: Mapping[str, str]
    # whether this driver is a standby for another driver, which may be on the same machine
    standby: bool = False


class OperatorService:
    """Server that answers the requests of operators of one driver.

    ``grow`` is a function that adds slots to this machine for a given number of workers. It returns "" on success,
    otherwise the reason for refusing, for example that the user specified the hosts.
    """

    def __init__(self, job: OperatorAccess, page: LivePage, log: Log) -> None:
        self.job = job
        self._page = page
        self._log = log
        self._driver: SteerableDriver | None = None
        self._grow: Grow = _no_room
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[AnswerRequest]] = {}
        self._servers: list[ControlServer[str]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._record: PublishedRecord | None = None

    def serves(self, driver: SteerableDriver, grow: Grow | None = None) -> None:
        """Set the driver to which requests are passed from now on."""
        self._driver, self._grow = driver, grow or _no_room

    async def open(self) -> None:
        """Listen on loopback for commands of this user.

        If the folder of records or a port is not available, log the reason and continue the job.
        """
        try:
            address = await self.listen("127.0.0.1")
            record = JobRecord(
                name=self.job.name,
                pid=os.getpid(),
                address=str(address),
                key=self.job.key.hex(),
                command=readable(self.job.command),
                journal=self.job.journal,
                began=time.time(),
            )
            self._record = PublishedRecord(self.job.environ, record)
            alike = [each for each in records(self.job.environ) if each.name == record.name]
            others = [each for each in alike if each.address != record.address]
            for other in [] if self.job.standby else others[:1]:
                self._log(
                    "warning",
                    f"job name {record.name} is in use by process {other.pid}; select this job by its process ID,"
                    f" {record.pid}",
                )
        except (OSError, Invalid) as error:
            why = f"commands such as elasticrun status can't find this job: {error}"
            self._log("warning", why)

    async def listen(self, interface: str, tls: ssl.SSLContext | None = None) -> Address:
        """Listen on an additional address, and return it. Raises OSError if the address cannot be bound."""
        server: ControlServer[str] = ControlServer(
            secret=self.job.key, log=self._log, callers=OPERATORS, tls=tls
        )
        self._servers.append(server)
        return await server.open(
            interface,
            received=lambda requester, message: self._on_request(server, requester, message),
            gone=lambda requester, silent: None,
            expected=lambda requester: True,
        )

    def answered(self, answer: AnswerRequest) -> None:
        """Send membership's answer to the operator. Called after the answer was written to the journal."""
        future = self._answers.pop(answer.request, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def close(self) -> None:
        if self._record is not None:
            self._record.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.close()

    # ---- one request -----------------------------------------------------------------------------------------------

    def _on_request(self, server: ControlServer[str], requester: str, request: Request) -> None:
        if len(self._tasks) >= AT_ONCE:
            server.send(
                requester,
                Told(request.number, False, "too many concurrent requests; retry the command"),
            )
            return
        task = asyncio.get_running_loop().create_task(self._serve(server, requester, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, server: ControlServer[str], requester: str, request: Request) -> None:
        answer = await self._done(requester, request)
        server.send(requester, msgspec.structs.replace(answer, number=request.number))

    async def _done(self, requester: str, request: Request) -> Told:
        match request:
            case messages.AskStatus():
                state = self._page.whole()
                return Told(0, True, data=msgspec.json.encode(state).decode())
            case messages.AskLogs(worker=name, after=after):
                return self._logs(name, after)
        if self._driver is None:
            return Told(0, False, "the job has not started yet; retry the command later")
        match request:
            case messages.AskScale(workers=workers):
                if workers < 1:
                    return Told(0, False, f"the number of workers is {workers}: pass at least 1")
                if refused := await self._grow(workers):
                    return Told(0, False, refused)
                return await self._decided(requester, lambda n: ScaleRequested(n, workers))
            case messages.AskDrain(host=host, off=off):
                return await self._decided(requester, lambda n: DrainRequested(n, host, off))
            case messages.AskRemove(worker=name):
                gone = self._page.worker_of(name)
                if gone is None:
                    return Told(0, False, self._unknown(name))
                return await self._decided(requester, lambda n: RemoveRequested(n, gone))
            case messages.AskStacks(worker=name, log=log, all_threads=all_threads):
                return await self._stacks(name, log=log, all_threads=all_threads)
            case messages.AskStop(why=why):
                self._driver.stop(f"requested by {shown(requester)}{why and ': '}{why}", STOP_CODE)
                text = "the job is stopping; repeat the command to stop it immediately"
                view = self._page.model.view
                if view.commits and view.durable is None:
                    text += (
                        f"; without --checkpoint-dir, its {view.commits} commits in memory are lost"
                    )
                return Told(0, True, text)
        raise AssertionError(
            f"no handler exists for the request {type(request).__name__}: add one to this method"
        )

    async def _decided(self, requester: str, event: Callable[[int], OperatorRequest]) -> Told:
        assert self._driver is not None
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            request = event(number)
            self._log("info", f"{shown(requester)} requested: {request_text(request)}")
            self._driver.handle_request(request)
            answer: AnswerRequest | None = None
            with contextlib.suppress(asyncio.TimeoutError):
                answer = await within(future, ANSWER_S)
        finally:
            self._answers.pop(number, None)
        if answer is None:
            return Told(0, False, f"no decision within {ANSWER_S:g} s; see elasticrun status")
        return Told(0, answer.done, str(answer.reason))

    async def _stacks(self, name: str, *, log: bool, all_threads: bool) -> Told:
        assert self._driver is not None
        model = self._page.model
        if name:
            worker = self._page.worker_of(name)
            if worker is None:
                return Told(0, False, self._unknown(name))
            workers = [worker]
        else:
            workers = self._page.members()[:STACKS]
        if not workers:
            return Told(0, False, "no worker is training")
        for worker in workers:
            model.expect_stack(worker, "requested by an operator", time.time(), asked=True)
            self._driver.dump(worker, all_threads=all_threads)
        most_s, quiet_s = (STACKS_ALL_S, QUIET_ALL_S) if all_threads else (STACKS_S, QUIET_S)
        deadline, before, quiet_since = time.monotonic() + most_s, "", time.monotonic()
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            found = {str(worker): self._page.stack_of(worker) for worker in workers}
            now = json.dumps(found)
            if now != before:
                before, quiet_since = now, time.monotonic()
            elif all(found.values()) and time.monotonic() - quiet_since >= quiet_s:
                break
        for source, stacks in found.items() if log else ():
            if stacks:
                self._log(
                    "info",
                    f"stacks of {source}, requested by an operator:\n{training_stack(stacks)}",
                )
        silent = [source for source, text in found.items() if not text]
        more = len(self._page.members()) - len(workers) if not name else 0
        text = f"of {len(workers) - len(silent)} of {len(workers)} workers"
        if silent:
            text += f"; none from {', '.join(silent)}: see the log"
        if more > 0:
            text += f"; {more} more ranks: request one of them"
        return Told(0, len(silent) < len(workers), text, json.dumps(found))

    def _logs(self, worker: str, after: int) -> Told:
        last, lines = self._page.model.state.since("log", after)
        if worker:
            lines = [line for line in lines if line[2] == worker]
            if not lines and after < 0 and self._page.worker_of(worker) is None:
                return Told(0, False, self._unknown(worker))
        return Told(0, True, data=json.dumps([last, lines[-TAILS["log"] :]]))

    def _unknown(self, name: str) -> str:
        size = len(self._page.model.view.ranks)
        # Ranks are assigned only once training begins.
        rank = f"a rank, 0 to {size - 1}, or " if size else ""
        return f"{name} is not a worker of this job: pass {rank}host:slot"
