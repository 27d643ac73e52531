"""Detection of out-of-memory kills by the kernel, and queries of the memory limit. Makes no decisions.

The exit status (SIGKILL) does not distinguish an out-of-memory kill from other kills. Each memory cgroup counts
its out-of-memory kills (`oom_kill` in `memory.events`, or in `memory.oom_control` before cgroup v2), and /proc/vmstat
counts those of the machine. Workers are in the cgroup of their agent, unless they were moved to another cgroup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED_BYTES = 1 << 60  # if memory is unlimited, cgroup v1 reports at least this limit
USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def parse_counts(text: str) -> dict[str, int]:
    """Parse lines with a name, a number and an optional unit, as in /proc/meminfo.

    Other lines are skipped.
    """
    fields = (line.split() for line in text.splitlines())
    return {each[0]: int(each[1]) for each in fields if len(each) in (2, 3) and each[1].isdigit()}


def memory_groups(text: str) -> tuple[str | None, str | None]:
    """Return the paths of the memory cgroups of version 2 and version 1, or None for a missing one.

    Args:
        text: contents of /proc/self/cgroup.
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["2"] = path
        elif "memory" in controllers.split(","):
            paths["1"] = path
    return paths.get("2"), paths.get("1")


@dataclass
class OutOfMemory:
    """Counter of the out-of-memory kills in the cgroup of this process.

    Args:
        root: root of the file system. In tests, a folder that contains simulated /proc and /sys folders.
    """

    root: Path = Path("/")
    _counter: Path = field(init=False)
    _limit: Path | None = field(default=None, init=False)
    _kills: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        second, first = memory_groups(_read(self.root / "proc/self/cgroup"))
        mounted = self.root / "sys/fs/cgroup"
        # In a container, the path may refer to the host's hierarchy although only the container's own group is mounted,
        # so the root of the mount is tried as well.
        places: list[tuple[Path, str, str]] = []
        for path in (first, "/") if first is not None else ():
            folder = mounted / "memory" / path.lstrip("/")
            places.append((folder, "memory.oom_control", "memory.limit_in_bytes"))
        for path in (second, "/") if second is not None else ():
            for below in (mounted, mounted / "unified"):
                places.append((below / path.lstrip("/"), "memory.events", "memory.max"))
        self._counter = self.root / "proc/vmstat"
        for folder, counter, limit in places:
            if "oom_kill" in _counts(folder / counter):
                self._counter, self._limit = folder / counter, folder / limit
                break
        self._kills = self._read_kills()

    def look(self) -> str:
        """Return a description of out-of-memory kills since the last call, or an empty string if there were none."""
        before, self._kills = self._kills, self._read_kills()
        if self._kills <= before:
            return ""
        limit = self.limit_bytes()
        return "out of memory" + ("" if limit is None else f", the limit is {limit / 1e9:.1f} GB")

    def limit_bytes(self) -> int | None:
        """Return the memory limit of this process's cgroup in bytes, or None if it has no limit."""
        text = "" if self._limit is None else _read(self._limit).strip()
        limited = text.isdigit() and int(text) < UNLIMITED_BYTES
        return int(text) if limited else None

    def available_bytes(self) -> int:
        """Return the number of bytes that this process's cgroup can still allocate.

        This is MemAvailable of the machine, or less if the cgroup has a memory limit. File caches count as available.

        Returns 0 if the kernel does not report MemAvailable.
        """
        machine = _counts(self.root / "proc/meminfo", unit=1024).get("MemAvailable:", 0)
        limit = self.limit_bytes()
        if limit is None or self._limit is None:
            return machine
        folder = self._limit.parent
        used = _read(folder / USED[self._limit.name]).strip()
        cached = _counts(folder / "memory.stat").get("inactive_file", 0)
        free = limit - int(used) + cached if used.isdigit() else machine
        return min(machine, max(0, free))

    def _read_kills(self) -> int:
        return _counts(self._counter).get("oom_kill", 0)


def _counts(file: Path, unit: int = 1) -> Mapping[str, int]:
    return {name: count * unit for name, count in parse_counts(_read(file)).items()}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
