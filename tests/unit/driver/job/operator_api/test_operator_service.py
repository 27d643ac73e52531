"""Operator service over real connections: authorization, and the effect of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest.mock import call, create_autospec

import pytest

from elastic.driver.commandline.running_jobs import job_commands
from elastic.driver.discovery.static import OwnSlots
from elastic.driver.events import (
    AnswerRequest,
    DrainRequested,
    Event,
    HostsChanged,
    RemoveRequested,
    ScaleRequested,
    WorkerExited,
)
from elastic.driver.job.job import Job as DriverJob
from elastic.driver.job.job_hosts import room_for
from elastic.driver.job.operator_api import client, messages, operator_service
from elastic.driver.job.operator_api.client import (
    JobAddress,
    JobClient,
    JobUnreachable,
    find_job,
    key_of,
)
from elastic.driver.job.operator_api.messages import Told
from elastic.driver.job.operator_api.operator_service import (
    OperatorAccess,
    OperatorService,
    SteerableDriver,
)
from elastic.driver.job.operator_api.runtime_folder import (
    JobRecord,
    PublishedRecord,
    records,
    runtime_folder,
)
from elastic.driver.monitoring.dashboard.live_page import LivePage
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Commit, Place, Worker
from harness.golden import raises, recorded
from harness.published import published, starts

SECRET = b"s" * 32
PLACE = Place(0, 2, 0, 2, 0, 1)
A, B = Worker("h", 0), Worker("h", 1)


class Job:
    """An operator service, and a driver that answers at once."""

    def __init__(self, folder: Path, *, standby: bool = False) -> None:
        self.page = LivePage(
            PageModel(TimeSpent(JobView()), name="bert", command=["train.py"], least=1, most=2)
        )
        self.lines: list[str] = []
        environ = {"XDG_RUNTIME_DIR": str(folder)}
        about = OperatorAccess(
            name="bert",
            key=key_of(SECRET),
            command=["train.py"],
            journal="/tmp/j",
            environ=environ,
            standby=standby,
        )
        self.desk = OperatorService(about, self.page, lambda level, text: self.lines.append(text))
        self.driver = create_autospec(SteerableDriver, instance=True)
        self.told: list[Event] = []
        self.driver.handle_request.side_effect = self._told
        self.reason = because(ReasonKind.SCALED, workers=3, before=2, slots=8, leave=0)
        self.environ = environ
        actions = [*starts(A, B), published(1, A, B)]
        self.page.model.view.note(HostsChanged({"h": 2}), actions, 10.0)

    def _told(self, event: Event) -> None:
        self.told.append(event)
        number = event.request  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        loop.call_soon(self.desk.answered, AnswerRequest(number, True, self.reason))

    async def ask(self, kind, *arguments) -> Told:
        def asked() -> Told:
            with JobClient(find_job("bert", self.environ)) as client:
                return client.ask(kind, *arguments)

        return await asyncio.to_thread(asked)


@contextlib.asynccontextmanager
async def running(folder: Path, *, standby: bool = False) -> AsyncIterator[Job]:
    job = Job(folder, standby=standby)
    await job.desk.open()
    job.desk.serves(job.driver)
    try:
        yield job
    finally:
        await job.desk.close()


def run(folder: Path, test: Callable[[Job], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with running(folder) as job:
            await test(job)

    asyncio.run(in_time())


async def test_request_becomes_an_event_and_its_answer_is_returned(tmp_path):
    async with running(tmp_path) as job:
        assert (await job.ask(messages.AskScale, 3)) == Told(1, True, "scaled from 2 to 3 workers")
        await job.ask(messages.AskDrain, "h", True)
        await job.ask(messages.AskRemove, "1")
        await job.ask(messages.AskRemove, "h:0")
        assert job.told == [
            ScaleRequested(1, 3),
            DrainRequested(2, "h", True),
            RemoveRequested(3, B),
            RemoveRequested(4, A),
        ]


async def test_excessive_number_of_workers_starts_no_worker(tmp_path):
    async with running(tmp_path) as job:
        own = OwnSlots({"h": 4})
        about = create_autospec(DriverJob, instance=True)
        about.settings = Settings(np=4, workers_min=2, workers_max=4, elastic=True)
        job.desk.serves(job.driver, room_for(about, own, cores=2))
        hosts = own.watch()
        assert await anext(hosts) == {"h": 4}
        answer = await job.ask(messages.AskScale, 100_000)
        assert not answer.done
        recorded("messages", answer.text)
        assert not job.told and own.slots == 4
        watching = asyncio.ensure_future(anext(hosts))
        reading = asyncio.ensure_future(drained(hosts, watching))
        assert (await job.ask(messages.AskScale, 16)).done
        assert own.slots == 16 and job.told == [ScaleRequested(1, 16)]
        reading.cancel()


async def drained(hosts: AsyncIterator[dict[str, int]], first: Awaitable[object]) -> None:
    """Continue reading, as a driver does."""
    await first
    async for _ in hosts:
        pass


@pytest.mark.parametrize("count", ["x", "0", "2.5"])
async def test_invalid_number_is_a_usage_error(tmp_path, count):
    async with running(tmp_path) as job:
        with raises(Invalid, count):
            await asyncio.to_thread(job_commands.main, "scale", ["bert", count], job.environ)


async def test_log_of_an_unknown_worker_is_rejected(tmp_path):
    async with running(tmp_path) as job:
        answer = await job.ask(messages.AskLogs, "9")
        assert not answer.done
        recorded("messages", answer.text)
        assert (await job.ask(messages.AskLogs, "1")).done
        job.page.model.state.tables["workers"].clear()  # as before the first world
        job.page.model.view.ranks = {}
        recorded("messages", (await job.ask(messages.AskLogs, "0")).text)


@pytest.mark.parametrize("name", ["2", "-1", "h:7", "h:0#2", "", "x"])
async def test_unknown_worker_is_rejected(tmp_path, name):
    async with running(tmp_path) as job:
        answer = await job.ask(messages.AskRemove, name)
        assert not answer.done
        recorded("messages", answer.text)
        assert not job.told


async def test_rejection_is_returned_with_its_reason(tmp_path):
    async with running(tmp_path) as job:

        def no(event: Event) -> None:
            answer = AnswerRequest(1, False, because(ReasonKind.FIXED_SIZE))
            asyncio.get_running_loop().call_soon(job.desk.answered, answer)

        job.driver.handle_request.side_effect = no
        rejection = await job.ask(messages.AskScale, 3)
        assert not rejection.done
        recorded("messages", rejection.text)


async def test_driver_that_does_not_decide_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(operator_service, "ANSWER_S", 0.01)
    async with running(tmp_path) as job:
        job.driver.handle_request.side_effect = None
        answer = await job.ask(messages.AskScale, 3)
        assert not answer.done
        recorded("messages", answer.text)


async def test_status_and_logs_are_returned(tmp_path):
    async with running(tmp_path) as job:
        state = json.loads((await job.ask(messages.AskStatus)).data)
        assert state["set"]["job"]["size"] == 2
        for who, text in (("", "generation 1"), ("1", "loss 0.5"), ("0", "loss 0.4")):
            job.page.model.line("info", who, text, 20.0)
        last, lines = json.loads((await job.ask(messages.AskLogs, "1")).data)
        assert (last, [line[3] for line in lines]) == (3, ["loss 0.5"])
        job.page.model.line("info", "1", "loss 0.3", 21.0)
        last, lines = json.loads((await job.ask(messages.AskLogs, "1", last)).data)
        assert (last, [line[3] for line in lines]) == (4, ["loss 0.3"])
        assert json.loads((await job.ask(messages.AskLogs, "", last)).data) == [4, []]


async def test_control_characters_from_workers_and_names_are_escaped(tmp_path, capsys):
    async with running(tmp_path) as job:
        job.page.model.line("info", "1", "\x1b]0;owned\x07\x1b[2Jloss\t0.5", 20.0)
        job.page.model.report(0, {"\x1b[31mloss": 0.5}, 20.0)
        for name in ("logs", "status"):
            assert await asyncio.to_thread(job_commands.main, name, [], job.environ) == 0
        printed = capsys.readouterr().out
        assert "\\x1b]0;owned\\x07\\x1b[2Jloss\t0.5" in printed and "\\x1b[31mloss 0.5" in printed
        assert "\x1b" not in printed


async def test_stacks_are_only_the_ones_written_after_the_request(tmp_path, monkeypatch):
    monkeypatch.setattr(operator_service, "QUIET_S", 0.0)
    monkeypatch.setattr(operator_service, "STACKS_S", 0.2)
    async with running(tmp_path) as job:

        def dump(worker: Worker, *, all_threads: bool) -> None:
            if worker == A:
                job.page.printed(worker, "0", "stderr", [b"Thread 1\n", b"  File train.py\n"])

        job.driver.dump.side_effect = dump
        answer = await job.ask(messages.AskStacks)
        stacks = json.loads(answer.data)
        assert stacks == {"h:0#1": "Thread 1\n  File train.py\n", "h:1#1": ""}
        assert answer.done
        recorded("messages", answer.text)


async def test_stacks_are_not_requested_of_members_that_have_exited(tmp_path, monkeypatch):
    monkeypatch.setattr(operator_service, "QUIET_S", 0.0)
    monkeypatch.setattr(operator_service, "STACKS_S", 0.2)
    async with running(tmp_path) as job:
        [again] = starts(A.next())
        job.page.model.view.note(WorkerExited(A, -9), [again], 20.0)
        answer = await job.ask(messages.AskStacks)
        assert list(json.loads(answer.data)) == ["h:1#1"]
        assert job.driver.dump.call_args_list == [call(B, all_threads=False)]


@pytest.mark.parametrize(
    ("flags", "printed", "logged"),
    [([], False, False), (["--all-threads"], True, False), (["--log"], False, True)],
)
async def test_stacks_show_the_script_and_are_logged_on_request(
    tmp_path, monkeypatch, capsys, flags, printed, logged
):
    monkeypatch.setattr(operator_service, "QUIET_S", 0.0)
    monkeypatch.setattr(operator_service, "STACKS_S", 0.2)
    monkeypatch.setattr(operator_service, "QUIET_ALL_S", 0.0)
    monkeypatch.setattr(operator_service, "STACKS_ALL_S", 0.2)
    async with running(tmp_path) as job:

        def dump(worker: Worker, *, all_threads: bool) -> None:
            assert all_threads == ("--all-threads" in flags)
            text = b'  File "train.py", line 3 in step'
            lines = [
                b"Thread 0x01 (most recent call first):",
                b'  File "<frozen x>", line 1 in read',
            ]
            job.page.printed(worker, "0", "diagnostics", [*lines, b"Thread 0x02 (...)", text])

        job.driver.dump.side_effect = dump
        assert await asyncio.to_thread(job_commands.main, "stacks", flags, job.environ) == 0
        output = capsys.readouterr().out
        assert ("<frozen x>" in output) is printed
        recorded("log", output)
        assert any("train.py" in line for line in job.lines) is logged
        assert job.page.model.was_asked(A)
        assert not any("train.py" in line[3] for line in job.page.model.state.series["log"])


async def test_stop_names_the_requester(tmp_path):
    async with running(tmp_path) as job:
        assert (await job.ask(messages.AskStop)).done
        [(reason, code)] = [call.args for call in job.driver.stop.call_args_list]
        assert code == 143
        recorded("messages", reason, f"(process {os.getpid()})")


async def test_request_when_received_then_the_log_names_its_user_and_process(tmp_path):
    async with running(tmp_path) as job:
        assert (await job.ask(messages.AskScale, 3)).done
        [line] = job.lines
        recorded("log", line, f"(process {os.getpid()})", "scale 3")


@pytest.mark.parametrize("name", ["ann@gpu1:4242:67cc5e4b", "ann@gpu1:67cc5e4b", "67cc5e4b", ""])
def test_requester_when_shown_then_without_its_random_part(name):
    assert "67cc5e4b" not in operator_service.shown(name) or name == "67cc5e4b"
    assert ("4242" in operator_service.shown(name)) == ("4242" in name)


async def test_stop_when_commits_are_in_memory_only_then_the_answer_counts_the_lost_ones(tmp_path):
    async with running(tmp_path) as job:
        none = (await job.ask(messages.AskStop)).text
        job.page.model.view.commits = 7
        lost = (await job.ask(messages.AskStop)).text
        assert lost.startswith(none) and "7" in lost.removeprefix(none)
        recorded("messages", lost)
        job.page.model.view.durable = Commit(2, 7)
        assert (await job.ask(messages.AskStop)).text == none


async def test_name_of_a_running_job_is_reported(tmp_path):
    first = PublishedRecord({"XDG_RUNTIME_DIR": str(tmp_path)}, record("bert", 1))
    async with running(tmp_path) as job:
        recorded("log", job.lines)
    async with running(tmp_path, standby=True) as job:
        assert not job.lines, "it waits for the other's end"
    first.close()
    async with running(tmp_path) as job:
        assert not job.lines


# ---- unauthorized peers ----------------------------------------------------------------------------------------------


async def test_peer_without_the_key_is_rejected(tmp_path):
    async with running(tmp_path) as job:
        there = find_job("bert", job.environ)
        for key in (SECRET, b"x" * 32, key_of(b"other" * 8)):
            with pytest.raises(JobUnreachable):
                await asyncio.to_thread(JobClient, JobAddress("bert", there.address, key))
        assert not job.told
        recorded("log", job.lines)


def test_stopped_driver_times_out(monkeypatch):
    """Its kernel accepts the connection, but nothing answers."""
    monkeypatch.setattr(client, "CONNECT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with raises(JobUnreachable):
            JobClient(JobAddress("x", address, SECRET))


def test_port_without_the_protocol_is_no_job(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def test(job: Job) -> None:
            asking = asyncio.to_thread(JobClient, JobAddress("x", f"127.0.0.1:{port}", SECRET))
            task = asyncio.create_task(asking)
            stranger, _ = await asyncio.to_thread(server.accept)
            stranger.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            stranger.close()
            with pytest.raises(JobUnreachable):
                await task

        run(tmp_path, test)


async def test_ended_job_does_not_answer(tmp_path):
    async with running(tmp_path) as job:
        there = find_job("bert", job.environ)
        await job.desk.close()
        with raises(JobUnreachable):
            await asyncio.to_thread(JobClient, there)
        with raises(Invalid):
            find_job("bert", job.environ)
        job.desk = OperatorService(job.desk.job, job.page, print)  # closed once more at the end


# ---- the folder ------------------------------------------------------------------------------------------------------


def record(name: str, port: int, journal: str = "") -> JobRecord:
    return JobRecord(name, os.getpid(), f"127.0.0.1:{port}", "00", [], journal, float(port))


def test_jobs_are_found_by_name_process_and_journal_or_as_the_only_one(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with raises(Invalid):
        find_job("", environ)
    journal = tmp_path / "j"
    journal.touch()
    first = PublishedRecord(environ, record("bert", 1, str(journal)))
    assert find_job("", environ).name == "bert"
    second = PublishedRecord(environ, record("gpt", 2))
    with raises(Invalid):
        find_job("", environ)
    with raises(Invalid):
        find_job("x", environ)
    assert find_job("gpt", environ).address == "127.0.0.1:2"
    assert find_job(str(journal), environ).name == find_job("", environ, journal=str(journal)).name
    second.close()
    assert find_job(str(os.getpid()), environ).name == "bert"
    first.close()
    with raises(Invalid, journal):
        find_job(str(journal), environ)
    assert records(environ) == []


def test_name_that_is_also_a_process_or_file_means_the_job_of_that_name(tmp_path, monkeypatch):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    monkeypatch.chdir(tmp_path)
    Path("bert").touch()
    left = [
        PublishedRecord(environ, record("job", 1)),
        PublishedRecord(environ, record(str(os.getpid()), 2)),
        PublishedRecord(environ, record("bert", 3)),
    ]
    assert find_job(str(os.getpid()), environ).address == "127.0.0.1:2"
    assert find_job("bert", environ).address == "127.0.0.1:3"
    for each in left:
        each.close()


def test_record_of_a_killed_driver_is_removed(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    left = PublishedRecord(environ, record("bert", 1))
    assert left.path.stat().st_mode & 0o777 == 0o600
    os.close(left._fd)  # as when its process exits
    assert records(environ) == [] and not left.path.exists()


def test_folder_accessible_to_other_users_is_not_used(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    runtime_folder(environ).mkdir(mode=0o700)
    runtime_folder(environ).chmod(0o755)
    with pytest.raises(Invalid, match="0700"):
        records(environ)
    with pytest.raises(Invalid, match="0700"):
        PublishedRecord(environ, record("bert", 1))
    runtime_folder(environ).rmdir()
    runtime_folder(environ).symlink_to(tmp_path)
    with pytest.raises(Invalid, match="0700"):
        records(environ)


def test_journal_of_another_user_names_its_owner(tmp_path):
    theirs = tmp_path / "j"
    theirs.touch()
    if os.geteuid() == 0:
        os.chown(theirs, 1, 1)
    else:
        theirs = Path("/etc/passwd")
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with raises(Invalid):
        find_job(str(theirs), environ)


def test_inaccessible_folder_is_named(tmp_path, monkeypatch):
    refused = create_autospec(Path.exists, side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "exists", refused)
    with raises(Invalid, tmp_path):
        records({"XDG_RUNTIME_DIR": str(tmp_path)})


async def test_job_continues_without_a_folder(tmp_path):
    (tmp_path / "hvd-elastic").write_text("")
    async with running(tmp_path) as job:
        recorded("log", job.lines)


def test_record_does_not_show_its_key():
    assert "c0ffee" not in repr(JobRecord("x", 1, "h:1", "c0ffee"))
    assert "c0ffee" not in repr(JobAddress("x", "h:1", b"c0ffee"))
