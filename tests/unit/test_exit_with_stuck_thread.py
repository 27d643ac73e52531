"""A process ends with its exit code although one of its threads never returns from C++."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

LONG_S = 30.0
STUCK = """
    import atexit, ctypes, sys, threading
    from elastic.collectives import threads_at_exit as threads

    libc = ctypes.CDLL(None)
    threads.begin("stuck", libc.pause)
"""


def ends(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STUCK) + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc's on_exit")
def test_exit_does_not_wait_for_a_hanging_cpp_exit_handler(tmp_path):
    done = ends(
        """
        libc.on_exit(ctypes.cast(libc.pause, ctypes.c_void_p), None)  # as a destructor that waits for the thread
        atexit.register(threads.leave_behind, 20.0)
        print("all is said", end="")
        sys.exit(3)
        """
    )
    assert (done.returncode, done.stdout) == (3, "all is said"), done.stderr


def test_interpreter_that_does_not_exit_is_ended_with_its_stacks():
    done = ends(
        """
        atexit.register(libc.pause)
        atexit.register(threads.leave_behind, 0.2)
        """
    )
    assert done.returncode == 1
    assert "Timeout (0:00:00.200000)!" in done.stderr
