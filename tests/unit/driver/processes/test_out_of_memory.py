"""Kernel counters of processes killed for lack of memory: cgroup v2, v1, containers, none."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.driver.processes.out_of_memory import OutOfMemory, memory_groups
from harness.golden import recorded

V1 = "8:pids:/\n4:cpu,memory:/jobs/a\n0::/\n"
LIMIT = "2000000000\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "folder", "counter", "limit"),
    [
        ("0::/jobs/a\n", "sys/fs/cgroup/jobs/a", "memory.events", "memory.max"),
        ("0::/of/the/host\n", "sys/fs/cgroup", "memory.events", "memory.max"),
        (V1, "sys/fs/cgroup/memory/jobs/a", "memory.oom_control", "memory.limit_in_bytes"),
        (V1, "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes"),
    ],
    ids=["v2", "v2 in a container", "v1", "v1 in a container"],
)
def test_kill_in_the_cgroup_is_reported_once_with_its_limit(
    tmp_path, cgroup, folder, counter, limit
):
    write(tmp_path, {"proc/self/cgroup": cgroup, "proc/vmstat": "oom_kill 9\n"})
    write(tmp_path, {f"{folder}/{counter}": "oom 3\noom_kill 2\n", f"{folder}/{limit}": LIMIT})
    memory = OutOfMemory(tmp_path)
    assert memory.look() == ""
    write(tmp_path, {f"{folder}/{counter}": "oom 4\noom_kill 3\n", "proc/vmstat": "oom_kill 9\n"})
    recorded("messages", memory.look())
    assert memory.look() == ""


def test_whole_machine_is_counted_without_a_memory_cgroup(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free 7\noom_kill 1\n"})
    memory = OutOfMemory(tmp_path)
    write(tmp_path, {"proc/vmstat": "nr_free 2\noom_kill 2\n"})
    recorded("messages", memory.look())


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", ""])
def test_unlimited_cgroup_has_no_limit(tmp_path, limit):
    write(tmp_path, {"proc/self/cgroup": "0::/a\n"})
    write(tmp_path, {"sys/fs/cgroup/a/memory.events": "oom_kill 0\n"})
    write(tmp_path, {"sys/fs/cgroup/a/memory.max": limit})
    assert OutOfMemory(tmp_path).limit_bytes() is None


def test_machine_without_counters_reports_no_kill(tmp_path):
    memory = OutOfMemory(tmp_path)
    assert memory.look() == ""
    write(tmp_path, {"proc/vmstat": "oom_kill many\n"})
    assert memory.look() == ""


def test_lines_of_proc_self_cgroup_are_parsed():
    assert memory_groups("0::/a:b\n") == ("/a:b", None)
    assert memory_groups(V1) == ("/", "/jobs/a")
    assert memory_groups("1:name=systemd:/\n") == (None, None)


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used"),
    [
        ("0::/a\n", "sys/fs/cgroup/a", "memory.max", "memory.current"),
        (
            "4:memory:/a\n",
            "sys/fs/cgroup/memory/a",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
    ids=["v2", "v1"],
)
def test_available_memory_is_the_minimum_of_machine_and_cgroup(
    tmp_path, cgroup, folder, limit, used
):
    counter = "memory.events" if limit == "memory.max" else "memory.oom_control"
    files = {counter: "oom_kill 0\n", limit: LIMIT, used: "1500000000\n"}
    write(tmp_path, {"proc/self/cgroup": cgroup, "proc/meminfo": "MemAvailable: 5000000 kB\n"})
    write(tmp_path, {f"{folder}/{name}": text for name, text in files.items()})
    write(tmp_path, {f"{folder}/memory.stat": "anon 7\ninactive_file 300000000\n"})
    assert OutOfMemory(tmp_path).available_bytes() == 800_000_000
    write(tmp_path, {f"{folder}/{used}": "9000000000\n"})
    assert OutOfMemory(tmp_path).available_bytes() == 0
    write(tmp_path, {f"{folder}/{limit}": "max\n"})
    assert OutOfMemory(tmp_path).available_bytes() == 5_000_000 * 1024


def test_available_memory_is_0_when_not_reported_by_the_kernel(tmp_path):
    assert OutOfMemory(tmp_path).available_bytes() == 0
