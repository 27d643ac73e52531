"""A worker's exception is sent to the agent, or printed without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from elastic.errors import (
    CollectiveFailed,
    Differing,
    DriverLost,
    Invalid,
    JobFailed,
    PeerLost,
    WorkerOrphaned,
)
from elastic.horovod_errors import HorovodPeerLost
from elastic.protocol.uncaught import sending
from elastic.protocol.uncaught.at_start import sitecustomize
from elastic.protocol.uncaught.sending import DIAGNOSTICS, Uncaught
from harness.golden import recorded

START = str(Path(sitecustomize.__file__).parent)


@pytest.fixture
def pipe():
    read, write = os.pipe2(os.O_CLOEXEC)
    yield read, {DIAGNOSTICS: f"/proc/{os.getpid()}/fd/{write}:{os.fstat(write).st_ino}"}
    os.close(read)
    os.close(write)


def caused_by(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (ValueError("x"), False),
        (PeerLost("x"), True),
        (HorovodPeerLost("x"), True),
        (CollectiveFailed("x", aborted=True), True),
        (caused_by(RuntimeError("x"), CollectiveFailed("x")), True),
        (CollectiveFailed("x", late=True), False),
        (CollectiveFailed("x", differs=Differing("k", 0, 2)), False),
        (caused_by(CollectiveFailed("why"), CollectiveFailed("x", late=True)), False),
        (Invalid("x"), False),
    ],
)
def test_errors_caused_by_a_lost_peer_are_recognized(error, peer):
    assert sending.because_of_a_peer(error) is peer


@pytest.mark.parametrize(
    ("error", "driver"),
    [
        (DriverLost("x"), True),
        (WorkerOrphaned("x"), True),
        (caused_by(RuntimeError("x"), WorkerOrphaned("x")), True),
        (JobFailed("x"), False),
        (PeerLost("x"), False),
    ],
)
def test_exception_that_a_lost_driver_caused_is_marked(error, driver):
    assert sending.of(error).driver is driver


def test_exception_is_sent_to_the_agent_as_one_line(pipe):
    read, environ = pipe
    assert sending.send(ValueError("a\nb \ud800"), environ)
    data = os.read(read, 1 << 16)
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    assert msgspec.json.decode(data, type=Uncaught).summary == "ValueError: a"


def test_a_message_of_any_length_is_cut(pipe):
    sent = sending.of(ValueError("x" * 10_000_000))
    assert len(sent.whole) < 2 * sending.LIMIT and sent.whole.startswith("ValueError: x")


@pytest.mark.parametrize("told", ["", "/proc/1/fd/999:5", "nothing"])
def test_no_exception_is_sent_without_an_agent(told):
    assert not sending.send(ValueError("x"), {DIAGNOSTICS: told})


def test_another_file_with_the_number_of_the_pipe_is_not_written_to(pipe, tmp_path):
    _, environ = pipe
    path, _, inode = environ[DIAGNOSTICS].rpartition(":")
    assert sending.opened({DIAGNOSTICS: f"{path}:{int(inode) + 1}"}) is None


def run(code: str, environ: dict[str, str], path: str = START) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_an_uncaught_exception_is_sent_to_the_agent_and_not_to_stderr(pipe):
    read, environ = pipe
    done = run("1 / 0", environ)
    assert (done.returncode, done.stderr) == (1, "")
    sent = msgspec.json.decode(os.read(read, 1 << 16), type=Uncaught)
    assert sent.summary.startswith("ZeroDivisionError") and not sent.peer


def test_exception_is_printed_by_python_without_an_agent():
    done = run("1 / 0", {})
    assert done.returncode == 1
    recorded("messages", done.stderr)


def test_script_and_its_children_have_no_changed_pythonpath(tmp_path):
    code = "import os, sys; print(os.environ.get('PYTHONPATH'), sys.path.count(sys.argv[0]))"
    assert run(code, {}).stdout.startswith("None ")
    assert run(code, {}, f"{START}{os.pathsep}{tmp_path}").stdout.startswith(f"{tmp_path} ")


def test_sitecustomize_of_the_user_is_still_imported(tmp_path, pipe):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = __file__\n")
    done = run("print(mine); 1 / 0", pipe[1], f"{START}{os.pathsep}{tmp_path}")
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'sitecustomize.py'}\n", "")


def test_a_forked_child_prints_its_own_exception(pipe):
    code = "import os\nif not os.fork():\n    1 / 0\nos.wait()"
    recorded("messages", run(code, pipe[1]).stderr)


def test_unresponsive_agent_is_waited_for_only_up_to_a_limit(pipe, monkeypatch):
    read, environ = pipe
    monkeypatch.setattr(sending, "READ_S", 0.01)
    assert not sending.send(ValueError("x" * 10 * sending.LIMIT), environ)
    assert os.read(read, 1 << 20)
