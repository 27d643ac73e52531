"""A stopped process is continued when the process that stopped it is gone."""

import os
import select
import signal
import subprocess
import sys

import pytest

from elastic.chaos.inject.resume_guard import Guard
from harness.golden import recorded

STOPS_IT_AND_IS_KILLED = """
import os, signal, sys
from elastic.chaos.inject.resume_guard import Guard
pid = int(sys.argv[1])
guard = Guard(os.pidfd_open(pid))
os.kill(pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def echo():
    """Answer as soon as it runs."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_stopped_process_is_continued_when_the_tool_is_killed(echo):
    code = subprocess.run([sys.executable, "-c", STOPS_IT_AND_IS_KILLED, str(echo.pid)], timeout=30)
    assert code.returncode == -signal.SIGKILL
    echo.stdin.write(b"still there\n")
    echo.stdin.flush()
    assert select.select([echo.stdout], [], [], 20.0)[0], "it is still stopped"
    recorded("messages", echo.stdout.readline())


def test_a_closed_guard_continues_no_process(echo):
    pidfd = os.pidfd_open(echo.pid)
    guard = Guard(pidfd)
    os.kill(echo.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, echo.pid, os.WSTOPPED)
    guard.close()
    os.close(pidfd)
    assert os.waitid(os.P_PID, echo.pid, os.WCONTINUED | os.WNOHANG) is None
