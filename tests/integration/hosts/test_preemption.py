"""Preemption notices of clouds, and the workers' reactions. Real requests on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import create_autospec

import psutil
import pytest

from elastic.driver.events import Notice
from elastic.driver.preemption import command, slurm, watch
from elastic.driver.preemption.aws import Aws
from elastic.driver.preemption.azure import Azure
from elastic.driver.preemption.google_cloud import GoogleCloud
from elastic.driver.preemption.source import NoticeSource, PreemptionNotice, SourceError
from elastic.errors import Invalid
from harness import metadata_servers, wording
from harness.golden import raises, recorded
from harness.history import SCRIPTS
from harness.metadata_servers import AwsCloud, AzureServer, Cloud, GoogleServer, served

pytestmark = pytest.mark.forked


@contextmanager
def aws() -> Iterator[tuple[AwsCloud, Aws]]:
    with served(AwsCloud()) as cloud:
        yield cloud, Aws({"AWS_EC2_METADATA_SERVICE_ENDPOINT": cloud.endpoint})


@contextmanager
def google() -> Iterator[tuple[GoogleServer, GoogleCloud]]:
    with served(GoogleServer()) as cloud:
        yield cloud, GoogleCloud({"GCE_METADATA_HOST": cloud.endpoint.removeprefix("http://")})


@contextmanager
def azure() -> Iterator[tuple[AzureServer, Azure]]:
    with served(AzureServer()) as cloud:
        yield cloud, Azure({"ELASTIC_AZURE_METADATA_ENDPOINT": cloud.endpoint})


CLOUDS = [aws, google, azure]


def left_s(ends: PreemptionNotice | None) -> float:
    assert ends is not None and ends.at is not None
    return ends.at - time.time()


# ---- what each cloud says --------------------------------------------------------------------------------------------


def test_aws_interrupts_a_spot_instance():
    with aws() as (cloud, source):
        assert source.here()
        assert source.look() is None
        cloud.interrupts(120.0)
        ends = source.look()
        assert ends is not None
        recorded("messages", ends.text)
        assert 115 < left_s(ends) <= 120
        cloud.change(action=None)
        assert source.look() is None


def test_aws_requests_a_new_token_when_the_first_one_expires():
    with aws() as (cloud, source):
        assert source.look() is None
        cloud.forget_tokens()
        assert source.look() is None
        assert sum("api/token" in each for each in cloud.asked) == 2


def test_a_rebalance_recommendation_of_aws_is_logged_once():
    with aws() as (cloud, source):
        cloud.change(rebalance=True)
        assert source.look() is None
        recorded("messages", source.hint())
        assert source.look() is None
        assert source.hint() == ""


def test_google_preempts_a_machine_and_the_answer_arrives_at_once():
    with google() as (cloud, source):
        assert source.here()
        assert source.look() is None
        ends = asyncio.run(_changes_while_it_looks(cloud, source, preempted="TRUE"))
        assert 25 < left_s(ends) <= 30


async def _changes_while_it_looks(
    cloud: Cloud, source: NoticeSource, **fields: str
) -> PreemptionNotice | None:
    """The long poll is there before the change is."""
    asked = len(cloud.asked)
    looking = asyncio.create_task(asyncio.to_thread(source.look))
    while len(cloud.asked) == asked:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    cloud.change(**fields)
    ends = await looking
    assert time.monotonic() - began < 5.0
    return ends


def test_google_maintenance_termination_is_a_notice_and_live_migration_is_not():
    with google() as (cloud, source):
        cloud.change(maintenance="MIGRATE_ON_HOST_MAINTENANCE")
        assert source.look() is None
        cloud.change(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
        assert 55 < left_s(source.look()) <= 60


def test_azure_preempts_a_machine_and_gets_an_early_approval():
    with azure() as (cloud, source):
        assert source.here()
        assert source.look() is None
        cloud.announces("Freeze", 30.0, id="E0")
        cloud.announces("Preempt", 30.0, of="worker_4", id="E1")
        assert source.look() is None  # a short pause; another machine
        cloud.announces("Preempt", 30.0, id="E2")
        ends = source.look()
        assert ends is not None
        recorded("messages", ends.text)
        assert 25 < left_s(ends) <= 30
        source.released()
        assert cloud.acknowledged == ["E2"]


def test_earlier_of_two_events_determines_the_end():
    with azure() as (cloud, source):
        cloud.announces("Redeploy", 600.0, id="E1")
        cloud.announces("Preempt", 30.0, id="E2")
        assert 25 < left_s(source.look()) <= 30


@pytest.mark.parametrize("cloud_of", CLOUDS)
@pytest.mark.parametrize("trouble", ["close", "garbage", 500, 403])
def test_undocumented_response_raises_source_error_and_recovers(cloud_of, trouble):
    with cloud_of() as (cloud, source):
        assert source.look() is None
        cloud.change(trouble=trouble)
        if trouble == "garbage":
            source = type(source)(_environ(cloud))
        with pytest.raises(SourceError):
            source.look()
        cloud.change(trouble="")
        assert source.look() is None


def _environ(cloud: Cloud) -> dict[str, str]:
    host = cloud.endpoint.removeprefix("http://")
    return {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": cloud.endpoint,
        "GCE_METADATA_HOST": host,
        "ELASTIC_AZURE_METADATA_ENDPOINT": cloud.endpoint,
    }


@pytest.mark.parametrize("cloud_of", CLOUDS)
def test_cloud_is_not_mistaken_for_another_one(cloud_of):
    with cloud_of() as (cloud, source):
        for kind in (Aws, GoogleCloud, Azure):
            assert kind(_environ(cloud)).here() is (kind is type(source))


def test_metadata_server_that_hangs_is_abandoned_within_five_seconds():
    with aws() as (cloud, source):
        cloud.change(trouble="hang")
        began = time.monotonic()
        assert not source.here()
        assert time.monotonic() - began < 5.0


def test_aws_metadata_disabled_variable_turns_the_source_off():
    with aws() as (cloud, _):
        off = Aws({**_environ(cloud), "AWS_EC2_METADATA_DISABLED": "true"})
        assert not off.here() and cloud.asked == []


# ---- Slurm, and commands ---------------------------------------------------------------------------------------------


def test_slurm_reports_the_end_of_the_allocation():
    def of(ends_in_s: float) -> slurm.Slurm:
        end = str(int(time.time() + ends_in_s))
        return slurm.Slurm({"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": end, "PATH": ""})

    assert not slurm.Slurm({}).here()
    assert of(600).here()
    assert of(600).look() is None
    assert 90 < left_s(of(100).look()) <= 100
    signalled = slurm.Slurm({"SLURM_JOB_ID": "77", "PATH": ""})
    signalled.signalled()
    assert 55 < left_s(signalled.look()) <= 60


@pytest.mark.parametrize("said", ["", "SLURM_JOB_END_TIME"])
def test_slurms_controller_is_queried_without_another_source_and_once_near_the_end(
    said: str, monkeypatch: pytest.MonkeyPatch
):
    """As squeue prints it: seconds, as SLURM_TIME_FORMAT asks, or that there is none."""
    run = create_autospec(subprocess.run)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(slurm, "ASK_S", 0.0)

    def answers(text: str, code: int = 0) -> None:
        run.return_value = subprocess.CompletedProcess([], code, f"odd\n78 1\n77 {text}\n", "")

    environ = {"SLURM_JOB_ID": "77", **({said: str(int(time.time() + 100))} if said else {})}
    source = slurm.Slurm(environ)
    answers("NONE")
    assert (source.look() is None) == (not said)
    assert run.call_args.kwargs["env"]["SLURM_TIME_FORMAT"] == "%s"
    answers(str(int(time.time() + 110)))
    assert 100 < left_s(source.look()) <= 110
    answers(str(int(time.time() + 9000)))  # scontrol update JobId=77 TimeLimit=...
    assert source.look() is None
    asked = run.call_count
    assert source.look() is None and run.call_count == asked, "it is far away"
    answers("slurm_load_jobs error: Unable to contact slurm controller", 1)
    monkeypatch.setattr(slurm, "LEAD_S", 99_000.0)
    assert left_s(source.look()) > 8000, "what was known stands"


def test_a_command_reports_whether_and_when(tmp_path):
    mark = tmp_path / "goes"
    source = command.Command(f"test -e {mark} && cat {mark}", os.environ)
    assert source.look() is None
    mark.write_text("")
    ends = source.look()
    assert ends is not None and ends.at is None
    mark.write_text("45 the landlord wants it back\n")
    ends = source.look()
    assert ends is not None
    recorded("messages", ends.text)
    assert 40 < left_s(ends) <= 45
    mark.unlink()
    assert source.look() is None
    with raises(SourceError):
        command.Command("no-such-program-here", os.environ).look()


def test_hanging_command_is_killed_with_its_children_at_the_timeout(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "ANSWER_S", 0.5)
    began = time.monotonic()
    with raises(SourceError):
        command.Command(f"sleep 99 & echo $! >{tmp_path}/pid; wait", os.environ).look()
    assert time.monotonic() - began < 50, "nobody waits for its sleep"
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10.0)  # it was told to end; the kernel takes a moment


@pytest.mark.parametrize("printed", ["inf", "1e300"])
def test_command_with_a_distant_or_infinite_end_is_clamped_to_one_million_seconds(printed):
    ends = command.Command(f"echo {printed}", os.environ).look()
    assert 0.9e6 < left_s(ends) <= 1e6  # what a message and a journal can hold


@pytest.mark.parametrize("endpoint", ["http://host:port", "https://host", "http://", "http://[::"])
def test_an_invalid_address_is_an_error(endpoint):
    with raises(SourceError):
        Aws({"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint})


def test_invalid_token_raises_source_error(monkeypatch):
    with aws() as (_, source):
        monkeypatch.setattr(metadata_servers, "TOKEN", "two\nlines")
        with raises(SourceError):
            source.look()


def test_unknown_preemption_source_is_refused():
    with raises(Invalid):
        watch.check("awss")
    with raises(Invalid):
        watch.check(" ")
    for wanted in ("auto", "off", "aws", "/opt/site/goes", "test -e /run/goes", "true"):
        watch.check(wanted)


# ---- the watch -------------------------------------------------------------------------------------------------------


class Told:
    """Return the states of a watch."""

    def __init__(self) -> None:
        self.notices: list[Notice | None] = []
        self.lines: list[str] = []
        self.news = asyncio.Event()

    def changed(self, notice: Notice | None) -> None:
        self.notices.append(notice)
        self.news.set()

    def log(self, level: str, text: str) -> None:
        if level != "debug":
            self.lines.append(text)
        self.news.set()

    async def until(self, found) -> None:
        async def wait() -> None:
            while not found():
                self.news.clear()
                await self.news.wait()

        await asyncio.wait_for(wait(), 20.0)


def watching(wanted: str, told: Told, cloud: Cloud) -> watch.Watch:
    found = watch.Watch(wanted, changed=told.changed, log=told.log, environ=_environ(cloud))
    found.begin()
    return found


async def test_auto_detects_the_cloud_and_reports_a_notice_and_its_end():
    with served(AwsCloud()) as cloud:
        told = Told()
        watched = watching("auto", told, cloud)
        cloud.interrupts(60.0)
        await told.until(lambda: told.notices)
        [notice] = told.notices
        assert notice is not None
        recorded("messages", notice.text)
        assert notice.within_s is not None and 50 < notice.within_s <= 60
        cloud.change(action=None)
        await told.until(lambda: told.notices[-1] is None)
        assert told.lines == []
        watched.close()


async def test_azure_gets_its_approval_once_no_worker_is_left():
    with served(AzureServer()) as cloud:
        told = Told()
        watched = watching("azure", told, cloud)
        cloud.announces("Preempt", 30.0)
        await told.until(lambda: told.notices)
        assert cloud.acknowledged == []
        watched.released()
        await told.until(lambda: told.notices[-1] is None)  # Azure lists no event that has begun
        assert cloud.acknowledged == ["E1"]
        watched.close()


async def test_a_worker_that_stays_after_a_notice_is_not_released_by_the_next():
    told = Told()
    watched = watch.Watch("off", changed=told.changed, log=told.log, environ={})
    watched._update("Azure", PreemptionNotice("it goes", None))
    watched.released()
    watched._update("Azure", None)
    assert not watched._released.is_set()


async def test_a_failing_cloud_service_and_its_recovery_are_logged_once(monkeypatch):
    monkeypatch.setattr(Aws, "pause_s", 0.001)
    with served(AwsCloud()) as cloud:
        told = Told()
        cloud.change(trouble=500)
        watched = watching("aws", told, cloud)
        await told.until(lambda: len(told.lines) == 2)
        cloud.change(trouble="")
        await told.until(lambda: len(told.lines) == 3)
        first, second, third = told.lines
        recorded("messages", first)
        recorded("messages", second)
        recorded("messages", third)
        watched.close()


# ---- whole jobs ------------------------------------------------------------------------------------------------------

TRAINING = ["python", str(SCRIPTS / "durable.py")]


def ended_by(training) -> str:
    told = [(r.get("event"), a) for r in training.records() for a in r.get("actions") or []]
    [ended] = [event for event, action in told if action["type"] == "EndJob"]
    return str(ended["type"])


def test_the_only_machine_is_preempted_and_the_same_command_resumes(job, tmp_path):
    folder = tmp_path / "checkpoints"
    flags = f"-np 2 --min-np 1 --checkpoint-every 1h --checkpoint-dir {folder}"
    with served(AwsCloud()) as cloud:
        env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": cloud.endpoint}
        training = job(f"{flags} --preemption aws", TRAINING, env=env)
        asked = "the two that the script asks for"
        training.until(lambda: len(training.events("CheckpointMade")) >= 2, asked)
        cloud.interrupts(20.0)
        training.wait_for(wording.LOCALHOST_GOES_AWAY_AWS)
        said = training.wait_for(wording.MACHINE_GOES_AWAY_COMMIT)
        assert training.wait(30) == 143
    assert ended_by(training) == "CheckpointMade", "it was asked for, and waited for"
    again = job(flags, TRAINING)
    again.wait_for(wording.TRAINING_GOES_FROM % (re.escape(said[1]),))
    again.wait_for("the same bits")
    again.driver.send_signal(signal.SIGTERM)
    again.wait_for(wording.SIGTERM_AT_DRIVER_COMMIT)
    assert again.wait(30) == 143
    assert ended_by(again) == "CheckpointMade"


TWO = ["-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1", "--resume"]


def left_without_a_break(training, folder) -> None:
    training.wait_for(wording.LEFT_EXIT_CODE_2)
    (folder / "enough").touch()
    assert training.wait(60) == 0
    assert training.actions("BreakWorld") == [] and training.actions("KillWorker") == []
    sizes = [len(world["members"]) for world in training.worlds()]
    assert sizes == [2, 2, 1]  # of init, of both, of the one that stays


def test_preemption_of_one_of_two_machines_fails_no_step(job, tmp_path):
    goes = tmp_path / "goes"
    asked = f'test -e {goes} -a "$ELASTIC_HOST" = 127.0.0.2 && echo 60 the landlord wants it back'
    flags = [*TWO, "--preemption", asked, "--checkpoint-dir", str(tmp_path)]
    training = job(flags, TRAINING)
    training.wait_for("rank 0 begins at 0")
    goes.touch()
    training.wait_for(
        r"127.0.0.2 will be reclaimed in \d+ s \(the landlord wants it back\): its workers"
    )
    left_without_a_break(training, tmp_path)


def test_sigterm_leaves_the_workers_of_an_agent_time_to_leave(job, tmp_path):
    training = job([*TWO, "--checkpoint-dir", str(tmp_path)], TRAINING)
    training.wait_for("rank 0 begins at 0")
    [started] = [e for e in training.events("WorkerConnected") if e["worker"][0] == "127.0.0.2"]
    agent = psutil.Process(started["pid"]).parent()
    assert agent is not None and agent.pid != training.driver.pid
    agent.send_signal(signal.SIGTERM)
    training.wait_for(wording.GOES_AWAY_AGENT_TOLD)
    left_without_a_break(training, tmp_path)
