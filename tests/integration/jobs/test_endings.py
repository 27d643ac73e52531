"""Nothing of a job is left at its end: no process, no port, no orphan; and its output is complete."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

import psutil
import pytest

from elastic.driver.launch.starter import AGENT_MODULE
from elastic.driver.network.secret import make_secret_file
from harness import wording
from harness.etcd import one_etcd
from harness.history import SCRIPTS, TRAINING, History, kill_slot, pid_of, sizes, started
from harness.job import Job, elasticrun
from harness.processes import clean_environment
from harness.waiting import wait_until

LOADING = ["python", SCRIPTS / "loading.py"]


def interrupt(running: Job) -> None:
    """As a terminal does it: the whole foreground process group gets the signal."""
    os.killpg(running.driver.pid, signal.SIGINT)


def ports(running: Job) -> set[tuple[str, int]]:
    """Addresses on which a process of the job listens."""
    found = set()
    for process in running.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in psutil.Process(process.pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


def answers(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


# ---- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.forked
def test_ctrl_c_in_training_ends_the_job_with_130(job):
    training = started(job, 2, HOLD="3:file=never")
    training.until(lambda: bool(History(training).all("step")), "training")
    interrupt(training)
    assert training.wait(30) == 130
    training.wait_for(wording.STOPPING_CTRL_AT_DRIVER)
    assert wording.BUG_DRIVER not in training.output


def test_ctrl_c_while_workers_start_ends_the_job_with_130(job):
    training = started(job, 2)
    training.wait_for("starting 2 workers")
    interrupt(training)
    assert training.wait(30) == 130


@pytest.mark.forked
def test_ctrl_c_outside_elastic_run_prints_no_traceback(job, tmp_path):
    """The driver has logged the reason once for all."""
    loop = (
        "import elastic, torch\nelastic.init()\nwhile True: print(elastic.allreduce(torch.ones(1)))"
    )
    (tmp_path / "loop.py").write_text(loop)
    plain = job("-np 1", ["python", tmp_path / "loop.py"])
    plain.wait_for("tensor")
    interrupt(plain)
    assert plain.wait(30) == 130
    assert "Traceback" not in plain.output and "Error" not in plain.output


@pytest.mark.forked
def test_second_ctrl_c_kills_workers_that_ignore_signals(job):
    """The workers take no notice of anything but SIGKILL."""
    stubborn = job(
        "-np 2 --min-np 1", ["sh", "-c", "trap '' TERM INT HUP; echo up; while :; do sleep 1; done"]
    )
    stubborn.wait_for("up", count=2)
    interrupt(stubborn)
    interrupt(stubborn)
    assert stubborn.wait(30) == 130


def test_second_ctrl_c_ends_an_agent_that_is_just_starting(job):
    """With --resume it outlives its driver, but for the end of the job."""
    training = job("-np 2 --min-np 1 -H localhost:2 --resume", TRAINING)

    def begun() -> bool:
        return any(AGENT_MODULE in process.info["cmdline"] for process in training.processes())

    training.until(begun, "an agent")
    interrupt(training)
    training.wait_for(wording.STOPPING_CTRL_AT_DRIVER)
    interrupt(training)
    assert training.wait(30) == 130


@pytest.mark.etcd
@pytest.mark.forked
def test_ctrl_c_twice_does_not_wait_for_an_etcd_that_is_silent(job, tmp_path):
    """Its journal exists, and its decisions wait for the journal."""
    make_secret_file(str(tmp_path / "secret"))
    with one_etcd(tmp_path / "etcd") as etcd:
        flags = f"--etcd {etcd.access.endpoints[0]} --job x --secret-file {tmp_path / 'secret'}"
        flags += " -np 2 --min-np 1 -H localhost:2 --resume"
        training = job(flags, TRAINING, env={"HOLD": "3:file=never"})
        training.until(lambda: bool(History(training).all("step")), "training")
        with etcd.members[0].stopped():
            interrupt(training)
            training.wait_for(wording.STOPPING_CTRL_AT_DRIVER)
            interrupt(training)
            assert training.wait(30) == 130


@pytest.mark.forked
def test_sigterm_at_the_driver_ends_the_job_with_143(job):
    training = started(job, 2, HOLD="3:file=never")
    training.until(lambda: bool(History(training).all("step")), "training")
    training.driver.terminate()
    assert training.wait(30) == 143


# ---- kill -9 -------------------------------------------------------------------------------------


def test_kill_9_of_the_driver_leaves_no_process_and_no_port(job):
    """Neither workers nor DataLoader workers nor what those started."""
    loading = job("-np 2 --min-np 1", LOADING, env={"STAY": "1", "GRANDCHILD": "1", "STEPS": "5"})
    for slot in range(2):
        loading.until((loading.folder / f"stays.{slot}").exists, "a busy worker")
    assert len(loading.processes()) >= 1 + 2 * (1 + 2 + 2)
    listening = ports(loading)
    assert listening
    loading.driver.kill()
    wait_until(lambda: not loading.processes(), f"the end of {loading.processes()}", 30)
    # A dying process lets its environment go, by which it is found, before its sockets.
    wait_until(lambda: not any(map(answers, listening)), "the ports to be free", 30)


@pytest.mark.forked
@pytest.mark.parametrize(
    "flags", [pytest.param("--fresh", marks=pytest.mark.nightly), "--resume --fresh"]
)
def test_fresh_job_ends_workers_orphaned_by_a_killed_driver(job, flags):
    first = started(job, 2, "--resume", HOLD="3:file=never")
    first.until(lambda: bool(History(first).all("step")), "training")
    first.unchecked = "its journal is begun anew"
    left = [psutil.Process(pid_of(first, slot)) for slot in range(2)]
    first.driver.kill()
    first.driver.wait()
    again, training = f"-np 2 --min-np 1 {flags}", [*map(str, TRAINING)]
    second = Job(again, training, folder=first.folder, env={"HOLD": "3:file=never"}, forked=True)
    try:
        second.wait_for("generation 2 has 2 workers")
        assert not any(each.is_running() for each in left)
        assert "warning" not in second.output
        second.driver.send_signal(signal.SIGINT)
        assert second.wait(30) == 130
    finally:
        assert not second.end()


@pytest.mark.forked
def test_sigkill_of_a_worker_leaves_no_orphaned_child(job):
    loading = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 60 60",
        LOADING,
        env={"STAY": "1", "STEPS": "5", "GRANDCHILD": "1"},
    )
    for slot in range(2):
        loading.until((loading.folder / f"stays.{slot}").exists, "a busy worker")
    worker = psutil.Process(pid_of(loading, 1))
    family = worker.children(recursive=True)
    assert len(family) >= 4
    kill_slot(loading, 1)
    wait_until(
        lambda: not any(p.is_running() and p.status() != "zombie" for p in family), "their end", 30
    )
    (loading.folder / "go").touch()
    loading.succeed()
    assert sizes(loading)[-1] == 1


@pytest.mark.forked
def test_a_job_that_succeeds_leaves_no_grandchild(job):
    loading = job("-np 2", LOADING, env={"STEPS": "3", "GRANDCHILD": "1"})
    loading.succeed()
    wait_until(lambda: not loading.processes(), "the end of the grandchildren", 30)


@pytest.mark.parametrize(
    "late_s", [0.2, pytest.param(1.0, marks=[pytest.mark.forked, pytest.mark.nightly])]
)
def test_a_script_that_ends_while_a_group_is_being_formed_has_ended_well(job, late_s):
    script = ["python", SCRIPTS / "leaving_early.py", str(late_s)]
    running = job("-np 2", script, env={"ELASTIC_NATIVE": "0"})  # torch forms the group
    running.succeed()
    for rank in range(2):
        running.wait_for(rf"^\[{rank}\] leaves")


# ---- output --------------------------------------------------------------------------------------


def test_output_has_the_rank_before_each_line_and_is_also_written_to_files(job):
    words = ["sh", "-c", "sleep 0.2; echo out of $HOROVOD_RANK; echo err of $HOROVOD_RANK >&2"]
    running = job("-np 2 --output-filename out -prefix-timestamp", words)
    running.succeed()
    for slot in range(2):
        running.wait_for(rf"^\d{{4}}-.*\[localhost:{slot}\] out of {slot}")


CHATTY = "for i in range(9_000): print(f'line {i:50}')\nraise SystemExit('THE REASON')"


def unread(*command: str) -> subprocess.Popen[bytes]:
    """A static job of one worker, whose whole output goes to an unread pipe."""
    return subprocess.Popen(
        [elasticrun(), "-np", "1", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(),
    )


def worker_ended(driver: subprocess.Popen[bytes]) -> bool:
    return not psutil.Process(driver.pid).children()


def test_late_reader_gets_all_output_and_the_reason_last():
    with unread("python", "-c", CHATTY) as driver:
        wait_until(lambda: bool(psutil.Process(driver.pid).children()), "a worker", 20)
        wait_until(lambda: worker_ended(driver), "its end", 20)
        with pytest.raises(subprocess.TimeoutExpired):
            driver.wait(2.5)  # longer than where a job is stopped
        assert driver.stdout is not None
        lines = driver.stdout.read().decode().splitlines()
    assert driver.returncode == 1
    assert sum(line.startswith("[localhost:0] line") for line in lines) == 9_000
    assert lines[-2] == "[localhost:0] THE REASON"
    assert wording.ERROR_JOB_ENDS_EXIT in lines[-1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_one_signal_ends_the_wait_for_an_output_reader(number, code):
    with unread("python", "-c", CHATTY) as driver:
        wait_until(lambda: bool(psutil.Process(driver.pid).children()), "a worker", 20)
        wait_until(lambda: worker_ended(driver), "its end", 20)
        # The loop has handed its signals back once the thread that waits is all there is to do.
        wait_until(lambda: not listens(driver.pid), "the end of the driver's server", 20)
        driver.send_signal(number)
        assert driver.wait(30) == code


def listens(pid: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return any(c.status == psutil.CONN_LISTEN for c in connections)


def test_an_agent_under_nohup_outlives_the_terminal(tmp_path):
    (tmp_path / "secret").write_text("ab" * 32)
    (tmp_path / "secret").chmod(0o600)
    line = 'trap "" HUP; exec "$0" agent --job j --driver 127.0.0.1:9 --secret-file secret'
    with subprocess.Popen(
        ["sh", "-c", line, elasticrun()],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
    ) as agent:
        assert agent.stderr is not None
        said = agent.stderr.readline() + agent.stderr.readline()
        assert wording.NO_DRIVER_SERVE in said  # its handlers stand
        agent.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            agent.wait(0.5)
        agent.terminate()
        assert wording.AGENT_ENDS_SIGTERM in agent.communicate(timeout=20)[1]
    assert agent.returncode == 143


@pytest.mark.parametrize(
    "closed", ["2>&-", pytest.param(">&-", marks=pytest.mark.nightly), "<&- >&- 2>&-"]
)
def test_closed_standard_streams_do_not_fail_a_job(closed, tmp_path):
    script = (
        "import sys, pathlib; print('x'); print('y', file=sys.stderr); pathlib.Path('done').touch()"
    )
    line = f'exec "$0" -np 1 python -c "{script}" {closed}'
    ended = subprocess.run(
        ["sh", "-c", line, elasticrun()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
        timeout=60,
    )
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()
    assert ended.stdout == ("[localhost:0] x\n" if closed == "2>&-" else "")
    assert "Traceback" not in ended.stderr


@pytest.mark.forked
def test_output_of_each_rank_is_written_to_a_separate_file(job):
    running = job("-np 2 --output-filename out", ["python", SCRIPTS / "plain.py", "-1", "0"])
    running.succeed()
    running.wait_for(r"^\[0\] step 4")
    running.wait_for(r"^\[1\] step 4")
    for rank in range(2):
        lines = (running.folder / "out" / f"rank.{rank}" / "stdout").read_text().splitlines()
        assert lines == [f"step {step} 2.0" for step in range(5)]


@pytest.mark.forked
def test_output_follows_the_rank_when_the_world_shrinks(job):
    training = started(
        job,
        3,
        "--blacklist-cooldown-range 60 60 --output-filename out",
        DIE="slot=0,step=3,place=forward",
    )
    training.succeed()
    training.wait_for(r"^\[2\] slot 2 enters")
    training.wait_for(r"^\[1\] slot 2 enters")
    assert "slot 2 enters" in (training.folder / "out" / "rank.1" / "stdout").read_text()


@pytest.mark.forked
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_signal_ends_a_job_that_waits_below_min_np(job, number):
    training = job(
        "-np 2 --min-np 2 --blacklist-cooldown-range 60 60",
        TRAINING,
        env={"DIE": "slot=1,step=3,place=forward"},
    )
    training.wait_for(wording.WAITING_MORE_WORKER)
    training.driver.send_signal(number)
    assert training.wait(30) == 128 + number
