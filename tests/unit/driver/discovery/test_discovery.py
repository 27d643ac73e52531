"""Discoveries: one contract for all, and the script adapter for scripts that fail, hang or print nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path

import pytest

from elastic.driver.discovery.etcd import EtcdDiscovery
from elastic.driver.discovery.interface import Discovery
from elastic.driver.discovery.kubernetes.headless_service import HeadlessServiceDiscovery
from elastic.driver.discovery.local import LocalDiscovery
from elastic.driver.discovery.polling import EMPTY_RUNS, QUIET
from elastic.driver.discovery.script import ScriptDiscovery, find_script
from elastic.driver.discovery.static import StaticDiscovery
from elastic.driver.etcd.client import Item
from elastic.driver.job.job import Job
from elastic.driver.job.job_hosts import first_hosts, script_discovery
from elastic.driver.ray.discovery import ClusterRequest, RayDiscovery
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from harness.fake_ray import FakeRay
from harness.fakes.discovery import FakeDiscovery
from harness.golden import raises, recorded
from harness.refusals import refusal_of

A = {"a": 2}
AB = {"a": 2, "b": 1}
NODES = {"10.0.0.1-aaaa": 2, "10.0.0.2-bbbb": 1}
# its hosts are addresses, all with the same number of slots
SERVICE = {"10.0.0.6": 2, "10.0.0.7": 2}


class Log(list[tuple[str, str]]):
    def __call__(self, level: str, text: str) -> None:
        self.append((level, text))


class Source:
    """A script that gives these answers, one per run, and repeats the last forever. An Invalid is raised."""

    def __init__(self, *answers: dict[str, int] | Invalid) -> None:
        self.answers = list(answers)

    async def __call__(self) -> dict[str, int]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Invalid):
            raise answer
        return dict(answer)


class OutOfTime(Exception):
    """The conversation has lasted the requested number of pauses."""


def pauses(number: int):
    """Return a sleep that takes no time, and ends the watch after ``number`` calls."""
    left = [number]

    async def sleep(seconds: float) -> None:
        assert seconds == 1.0
        left[0] -= 1
        if left[0] <= 0:
            raise OutOfTime
        await asyncio.sleep(0)

    return sleep


def watched(
    *answers: dict[str, int] | Invalid, known: dict[str, int] | None = None
) -> tuple[list[dict[str, int]], Log]:
    """Return the yielded lists and the log while a script gives these answers."""
    log = Log()
    discovery = ScriptDiscovery(
        ["/hosts.sh"],
        log,
        known=known,
        ask=Source(*answers),
        sleep=pauses(len(answers) + (known is not None)),
    )
    return asyncio.run(everything(discovery)), log


async def everything(discovery: Discovery) -> list[dict[str, int]]:
    seen = []
    try:
        async for hosts in discovery.watch():
            seen.append(hosts)
    except OutOfTime:
        pass
    return seen


def script(folder: Path, body: str) -> list[str]:
    file = folder / "hosts.sh"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return [str(file)]


def ask(command: list[str], **rest) -> dict[str, int]:
    return asyncio.run(ScriptDiscovery(command, Log(), **rest).ask())


def refusal(command: list[str], **rest) -> str:
    return refusal_of(ask, command, **rest)


# ---- hosts registered in etcd

HOSTS = "/hvd-elastic/job/hosts/"


def registered(*hosts: str) -> dict[str, Item]:
    """Return the items under ``hosts/``, in the order of their registration."""
    items = {}
    for revision, host in enumerate(hosts, 1):
        name, _, slots = host.rpartition(":")
        value = b'{"slots": %s, "incarnation": 1}' % slots.encode()
        items[HOSTS + name] = Item(value, revision, revision, 7)
    return dict(sorted(items.items()))


class Registered:
    """An etcd with these tables, which then waits; ``settling`` are its answers of `unsettled_s`."""

    def __init__(self, *tables: dict[str, Item], settling: Iterable[float] = ()) -> None:
        self.tables = tables
        self.settling = iter(settling)

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[dict[str, Item], None]:
        assert prefix == HOSTS
        for table in self.tables:
            yield table
        await asyncio.Event().wait()

    def unsettled_s(self, settle_s: float) -> float:
        return next(self.settling, 0.0)


class NobodyWaits(selectors.DefaultSelector):
    """A selector that returns at once, as if the timeout had passed."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passed_s += timeout or 0.0
        return super().select(0.0)


class Hurried(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selected = NobodyWaits()
        super().__init__(self._selected)

    def time(self) -> float:
        return self._selected.passed_s


def listed(etcd: Registered) -> tuple[list[dict[str, int]], Log]:
    """Return the lists until no more are yielded."""
    log = Log()

    async def conversation() -> list[dict[str, int]]:
        seen = []
        lists = EtcdDiscovery(etcd, "job", log).watch()
        with contextlib.suppress(asyncio.TimeoutError):
            while True:
                seen.append(await asyncio.wait_for(anext(lists), 0.02))
        await lists.aclose()
        return seen

    with contextlib.closing(Hurried()) as loop:
        return loop.run_until_complete(conversation()), log


def test_first_registered_host_is_preferred():
    [hosts], _ = listed(Registered(registered("z:1", "b:2", "a:4")))
    assert list(hosts.items()) == [("z", 1), ("b", 2), ("a", 4)]


def test_unchanged_hosts_are_not_yielded_again():
    lists, _ = listed(Registered(registered("a:2"), registered("a:2"), registered("a:2", "b:1")))
    assert lists == [A, AB]


@pytest.mark.parametrize("value", [b"", b"\xff", b"{}", b'{"slots": 0, "incarnation": 1}', b"7"])
def test_invalid_host_is_logged_once_and_omitted(value):
    table = registered("a:2") | {HOSTS + "c": Item(value, 9, 9, 0)}
    lists, log = listed(Registered(table, table | registered("a:2", "b:1")))
    assert lists == [A, AB]
    assert log == [("warning", f"etcd key {HOSTS}c skipped: it does not describe a host")]


def test_invalid_name_is_omitted():
    strange = {HOSTS + name: registered("a:1")[HOSTS + "a"] for name in ("", "a/b", "a b", "a:2")}
    lists, log = listed(Registered(strange | registered("a:2")))
    assert lists == [A]
    assert len(log) == 4


def test_hosts_have_time_to_register_again_after_an_etcd_outage():
    # b's lease expired because it could not be renewed; b registers again in time.
    away = [0.0, 0.0, 5.0, 5.0, 5.0, 5.0]
    tables = registered("a:2", "b:1"), registered("a:2"), registered("a:2", "b:1")
    assert listed(Registered(*tables, settling=away))[0] == [AB]


def test_host_that_does_not_register_again_is_removed():
    away = [0.0, 0.0, 0.0, 0.01, 0.005]
    lists, _ = listed(Registered(registered("a:2", "b:1"), registered("a:2"), settling=away))
    assert lists == [AB, A]


# ---- the contract


def on_ray(log: Log) -> RayDiscovery:
    """Claims of an earlier driver are placed, and one waits."""
    ray = FakeRay(aaaa=2, bbbb=1)
    for number in range(4):
        ray.make(f"hvd-elastic:job:{number}", {"CPU": 1}, {}, detached=True)
    ray.tick()
    return RayDiscovery(ClusterRequest(4, {"CPU": 1}), log, job="job", cluster=ray)


async def service(name: str, port: int, timeout_s: float) -> list[tuple[int, str]]:
    return [(int(socket.AF_INET), address) for address in reversed(SERVICE)]


@pytest.fixture(params=["static", "script", "fake", "local", "kubernetes", "etcd", "ray"])
def discovery(request, tmp_path) -> Discovery:
    log = Log()
    match request.param:
        case "static":
            return StaticDiscovery(AB)
        case "fake":
            return FakeDiscovery(AB)
        case "local":
            return LocalDiscovery(FakeDiscovery(AB), lambda host: None, log)
        case "etcd":
            return EtcdDiscovery(Registered(registered("a:2", "b:1")), "job", log)
        case "kubernetes":
            return HeadlessServiceDiscovery("workers", 2, log, resolve=service)
        case "ray":
            return on_ray(log)
    return ScriptDiscovery(script(tmp_path, "echo a:2; echo b"), log)


async def test_current_list_is_yielded_first_and_owned_by_the_caller(discovery):
    lists: AsyncIterator[dict[str, int]] = discovery.watch()
    first = await asyncio.wait_for(anext(lists), 10)
    expected = {HeadlessServiceDiscovery: SERVICE, RayDiscovery: NODES}.get(type(discovery), AB)
    assert list(first.items()) == list(expected.items())
    first.clear()
    # Nothing has changed: it has either ended or waits.
    with pytest.raises((StopAsyncIteration, asyncio.TimeoutError)):
        await asyncio.wait_for(anext(lists), 0.01)


def test_static_list_ends_at_once():
    assert asyncio.run(everything(StaticDiscovery(AB))) == [AB]


async def test_fake_yields_pushed_lists_until_closed():
    fake = FakeDiscovery(A)
    for hosts in (A, AB, {}, A):
        fake.push(hosts)
    fake.close()
    assert await everything(fake) == [A, AB, {}, A]


# ---- a script over time


def test_only_changes_are_yielded():
    assert watched(A, A, AB, AB, A) == ([A, AB, A], [])


def test_different_order_is_a_change():
    lists, _ = watched(AB, {"b": 1, "a": 2})
    assert [list(hosts) for hosts in lists] == [["a", "b"], ["b", "a"]]


def test_known_list_is_yielded_first_without_running_the_script():
    assert watched(A, AB, known=A) == ([A, AB], [])


def test_failure_and_its_end_are_logged_once():
    down = Invalid("it is down")
    assert watched(A, down, down, A, A, AB) == (
        [A, AB],
        [
            ("warning", "it is down; keeping a:2"),
            ("info", "discovery script /hosts.sh works again"),
        ],
    )


def test_different_failure_is_logged_but_not_each_invalid_output():
    _, log = watched(A, *(Invalid(f"garbage {n}") for n in range(2 * QUIET + 3)), A)
    recorded("log", [text for _, text in log])


def test_fewer_than_three_empty_runs_keep_the_last_list():
    lists, log = watched(A, {}, {}, A, {}, {}, AB)
    assert lists == [A, AB]
    assert [level for level, _ in log] == ["warning"] * 4


def test_three_consecutive_empty_runs_are_an_empty_list():
    lists, log = watched(A, *([{}] * (EMPTY_RUNS + 5)), A)
    assert lists == [A, {}, A]
    assert [level for level, _ in log] == ["warning"] * EMPTY_RUNS, "it is said once"


def test_failure_between_empty_runs_restarts_the_count():
    down = Invalid("it is down")
    assert watched(A, {}, {}, down, {}, {}, A)[0] == [A]
    assert watched(A, *([down] * 10), A)[0] == [A]


def test_failure_after_an_empty_list_keeps_the_list_empty():
    assert watched(A, {}, {}, {}, Invalid("it is down"), {}, AB)[0] == [A, {}, AB]


def test_initially_empty_list_is_no_failure():
    assert watched({}, {}, A) == ([{}, A], [])


def test_failure_before_any_list():
    lists, log = watched(Invalid("it is down"), A)
    assert lists == [A]
    recorded("log", log[0])


# ---- one run of a real script


def test_valid_output_is_parsed(tmp_path):
    command = script(tmp_path, "echo '# now'; echo; echo a:4; echo '[::1]:2'; echo b; echo gone:0")
    assert ask(command, default_slots=3) == {"a": 4, "::1": 2, "b": 3}


def test_script_may_have_arguments(tmp_path):
    [file] = script(tmp_path, 'echo "$1:$2"')
    assert ask(find_script(f"{file} a 2")) == A


def test_script_without_a_shebang_is_run_by_the_shell(tmp_path):
    (tmp_path / "hosts").write_text("echo a:2\n")
    (tmp_path / "hosts").chmod(0o755)
    assert ask([str(tmp_path / "hosts")]) == A


def test_failing_script_is_reported_with_its_output(tmp_path):
    command = script(tmp_path, "echo one >&2; echo no such cluster >&2; exit 3")
    recorded("messages", refusal(command), command[0])
    recorded("messages", refusal(script(tmp_path, "kill -9 $$")))


def test_invalid_line_is_reported_with_its_number(tmp_path):
    command = script(tmp_path, "echo a:2; echo 'Error: not logged in'; echo hint >&2")
    recorded("messages", refusal(command), command[0])


def test_script_that_prints_forever_is_killed(tmp_path):
    error = refusal(script(tmp_path, "yes"), timeout_s=0.3)
    recorded("log", error)


def test_excessive_output_is_reported(tmp_path):
    recorded("messages", refusal(script(tmp_path, "yes | head -c 3000000")))


def test_script_that_hangs_is_killed_with_its_children(tmp_path):
    command = script(tmp_path, f"sleep 100 & echo $! > {tmp_path}/pid; wait")
    recorded("messages", refusal(command, timeout_s=0.3))
    assert has_died(int((tmp_path / "pid").read_text()))


def test_program_left_in_the_background_is_not_awaited(tmp_path):
    command = script(tmp_path, f"sleep 100 & echo $! > {tmp_path}/pid; echo a:2")
    started = time.monotonic()
    assert ask(command) == A
    assert time.monotonic() - started < 5
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


async def test_event_loop_is_not_blocked_by_a_script_which_is_killed_at_the_end(tmp_path):
    command = script(
        tmp_path, f"echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; sleep 100"
    )
    watching = asyncio.create_task(everything(ScriptDiscovery(command, Log())))
    while not (tmp_path / "pid").exists():
        await asyncio.sleep(0.005)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert has_died(int((tmp_path / "pid").read_text()))


def has_died(pid: int) -> bool:
    """Wait for a process that was just killed."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([pidfd], [], [], 5)
    os.close(pidfd)
    return bool(ready)


def test_script_is_found(tmp_path, monkeypatch):
    [file] = script(tmp_path, "echo a")
    monkeypatch.chdir(tmp_path)
    assert find_script("hosts.sh") == [file]
    assert find_script("./hosts.sh --all 'two words'") == [file, "--all", "two words"]
    assert find_script("hosts.sh", path="/nonexistent") == [file]
    spaced = tmp_path / "my hosts"
    spaced.write_text("#!/bin/sh\n")
    spaced.chmod(0o755)
    assert find_script("my hosts") == [str(spaced)]
    (tmp_path / "plain").write_text("")
    with raises(Invalid):
        find_script("plain")
    for missing in ("nowhere.sh", "", "'unclosed"):
        with raises(Invalid):
            find_script(missing)


# ---- only this machine


async def test_hosts_elsewhere_are_omitted_and_logged_once():
    log = Log()
    fake = FakeDiscovery(A, AB | {"c": 1}, {"a": 2, "b": 2}, {"b": 1, "d": 1})
    fake.close()
    local = LocalDiscovery(fake, lambda host: None if host == "a" else "it is far", log)
    lists, log = await everything(local), log
    assert lists == [A, {}]
    [(level, text)] = log
    assert level == "warning"
    recorded("log", text)


# ---- first list of a job


def job(command: list[str] | None, hosts: dict[str, int] | None = None) -> Job:
    settings = Settings(np=2, workers_min=1, workers_max=4, elastic=True)
    return Job(command=["true"], settings=settings, hosts=hosts, script=command)


def first_list(opened: Job) -> tuple[dict[str, int], Log]:
    log = Log()

    async def conversation() -> dict[str, int]:
        known = await first_hosts(opened, log)
        assert known is not None
        return await anext(script_discovery(opened, known, log).watch())

    return asyncio.run(conversation()), log


def test_job_starts_with_the_first_list_of_the_script(tmp_path):
    command = script(tmp_path, f"echo run >> {tmp_path}/runs; echo localhost:2")
    assert first_list(job(command)) == ({"localhost": 2}, [])
    assert (tmp_path / "runs").read_text() == "run\n"


def test_job_may_start_without_hosts(tmp_path):
    lists, log = first_list(job(script(tmp_path, "true")))
    assert lists == {}
    recorded("log", log[0][1])


@pytest.mark.parametrize("body", ["exit 1", "echo '???'"])
def test_first_run_must_succeed(tmp_path, body):
    recorded("messages", refusal_of(first_list, job(script(tmp_path, body))))
