"""Parsing of /proc, with texts in the kernel's format, and once for this process."""

import os
import platform
import signal
import subprocess
import sys

import pytest

from elastic.driver.processes import proc_stats
from elastic.driver.processes.proc_stats import (
    ThreadStatus,
    is_frozen,
    parse_cgroup,
    parse_end,
    parse_io,
    parse_mounts,
    parse_stat,
    parse_status,
    parse_thread,
)
from harness.golden import raises
from harness.waiting import wait_until

REST = b"4194304 800 120 0 0 250 50 30 20 20 0 5 0 31256 9000000 900 18446744073709551615 1 1 0"


@pytest.mark.parametrize(
    "name",
    [b"python", b"a b", b"a) S 1 1 1", b"(sd-pam)", b"))) T 7", b""],
    ids=["plain", "a space", "a whole state", "parentheses", "closing ones", "nothing"],
)
def test_command_may_have_any_name(name):
    stat = parse_stat(b"4711 (" + name + b") S 12 4711 4700 34816 4711 " + REST + b"\n")
    assert (stat.state, stat.parent, stat.session) == ("S", 12, 4700)
    assert stat.ticks == 250 + 50 + 30 + 20  # its own in user and kernel mode, and its children's


def test_incomplete_line_is_rejected():
    for text in (b"", b"4711 (python", b"4711 (python) S 12"):
        with raises(ValueError):
            parse_stat(text)


@pytest.mark.parametrize(
    "state, flags, code, expected",
    [
        (b"R", 0x400040, 0, (False, 0)),
        (b"R", 0x40004C, 9, (True, 9)),  # it is dying, and still has its memory
        (b"Z", 0x400100, 256, (True, 256)),
    ],
    ids=["runs", "dying", "dead"],
)
def test_processes_that_never_run_again_are_recognized(state, flags, code, expected):
    fields = [state, *[b"1"] * 5, b"%d" % flags, *[b"7"] * 42, b"%d" % code]
    assert parse_end(b"4711 (a b) S) " + b" ".join(fields) + b"\n") == expected


def test_debugger_and_handled_signals_are_recognized():
    text = b"Name:\tpython\nTracerPid:\t77\nSigQ:\t0/7\nSigCgt:\t0000002000000002\n"
    assert parse_status(text) == (77, 1 << 37 | 1 << 1)
    assert parse_status(b"") == (0, 0)


def test_status_of_a_thread_is_parsed():
    text = (
        b"Name:\ta: b\nState:\tS (sleeping)\nTgid:\t4711\nPid:\t4712\n"
        b"SigPnd:\t0000002000000000\nShdPnd:\t0000000000000001\nSigBlk:\t0000000000000002\n"
    )
    assert parse_thread(text) == ThreadStatus(4712, "a: b", "S", 1 << 37, 2)
    with raises(ValueError):
        parse_thread(b"")


def test_threads_of_this_process_are_found():
    [own] = [each for each in proc_stats.threads_of(os.getpid()) if each.id == os.getpid()]
    assert own == proc_stats.thread_of(os.getpid(), os.getpid())


def test_bytes_read_and_written_are_counted():
    text = b"rchar: 1000\nwchar: 24\nsyscr: 5\nsyscw: 6\nread_bytes: 4096\nwrite_bytes: 0\n"
    assert parse_io(text) == 1024
    assert parse_io(b"") == 0  # another user's process


MOUNTS = b"""\
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""


def test_freezer_files_of_a_cgroup_are_found():
    mounts = parse_mounts(MOUNTS)
    assert mounts == {"freezer": "/sys/fs/cgroup/freezer", "unified": "/sys/fs/cgroup/unified"}
    text = b"6:freezer:/job\n1:cpu,cpuacct:/elsewhere\n0::/a:b/c\n"
    assert parse_cgroup(text, mounts) == [
        "/sys/fs/cgroup/freezer/job/freezer.state",
        "/sys/fs/cgroup/unified/a:b/c/cgroup.events",
    ]
    assert parse_cgroup(b"6:freezer:/\n0::/\n", mounts) == []  # the root cannot be frozen
    assert parse_cgroup(text, {}) == []


def test_cgroup_v2_has_a_single_hierarchy():
    mounts = parse_mounts(b"cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n")
    assert parse_cgroup(b"0::/user.slice/x\n", mounts) == [
        "/sys/fs/cgroup/user.slice/x/cgroup.events"
    ]


def test_frozen_state_is_parsed():
    assert is_frozen(b"populated 1\nfrozen 1\n") and is_frozen(b"FROZEN\n")
    for text in (b"populated 1\nfrozen 0\n", b"THAWED\n", b"FREEZING\n", b""):
        assert not is_frozen(text)


def test_running_process_is_not_stopped():
    why, stat = proc_stats.cannot_run(os.getpid(), None)
    assert (why, stat.session) == ("", os.getsid(0))
    assert proc_stats.cannot_run(os.getpid(), stat)[0] == ""
    assert not proc_stats.frozen(os.getpid()) and not proc_stats.traced(os.getpid())
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert proc_stats.handles(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not proc_stats.handles(os.getpid(), signal.SIGRTMIN + 9)


def test_missing_process_has_no_state():
    none = 2**22 + 1  # greater than any process ID
    assert proc_stats.stat_of(none).state == proc_stats.GONE
    assert proc_stats.cannot_run(none, None)[0] == ""
    assert not proc_stats.handles(none, signal.SIGINT)
    assert proc_stats.threads_of(none) == [] and proc_stats.thread_of(none, none) is None
    seen = proc_stats.samples_of({none})[none]
    assert (seen.state, seen.cpu_s, seen.io_bytes, seen.traced) == (proc_stats.GONE, 0.0, 0, False)


def test_running_process_has_no_end_and_open_devices_are_found(monkeypatch):
    assert proc_stats.end_of(os.getpid()) is None
    with open("/dev/null", "rb"):
        assert not proc_stats.uses_devices(os.getpid())
        monkeypatch.setattr(proc_stats, "_PLAIN", ("zero",))
        assert proc_stats.uses_devices(os.getpid())


def test_device_is_open_while_any_thread_uses_the_device(monkeypatch):
    ends = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # exit(2), which ends only this thread
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('here', flush=True)\n"
        f"ctypes.CDLL(None).syscall({ends}, 0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        wait_until(lambda: not os.listdir(f"/proc/{process.pid}/fd"), "its main thread's end", 30.0)
        assert not proc_stats.uses_devices(process.pid)
        monkeypatch.setattr(proc_stats, "_PLAIN", ("zero",))
        assert proc_stats.uses_devices(process.pid)
        assert proc_stats.end_of(process.pid) is None
        process.kill()
    assert proc_stats.uses_devices(process.pid)  # unknown
