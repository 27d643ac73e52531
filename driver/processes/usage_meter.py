"""Measurement of the CPU, memory and GPU usage of each worker of this host, including all processes of its session.

`Rates` is pure. `Gpus` queries NVML if nvidia-ml-py (extra ``gpu-usage``) and the driver are installed. In a container
with its own PID namespace, NVML reports process IDs of another namespace, so GPU usage is unknown.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Mapping
from typing import Any

from elastic.driver.output_interfaces import Usage
from elastic.driver.processes import proc_stats
from elastic.driver.processes.proc_stats import ProcSample

USAGE_S = 5.0  # interval between two measurements, in seconds
# utilization of the process's busiest GPU (0 to 1), and the bytes that the process uses on all GPUs
Gpu = tuple[float | None, int]


class Rates:
    """Calculator of the CPU usage of processes from consecutive samples."""

    def __init__(self) -> None:
        # Time of the last measurement and CPU time in seconds, by process ID.
        self._before: dict[int, tuple[float, float]] = {}

    def between(
        self, samples: Mapping[int, ProcSample], gpus: Mapping[int, Gpu], now: float
    ) -> dict[int, Usage]:
        """Return the usage of each running process since the previous call.

        In the first measurement of a process, ``cores`` is None.
        """
        found: dict[int, Usage] = {}
        before, self._before = self._before, {}
        for pid, sample in samples.items():
            if sample.state == proc_stats.GONE:
                continue
            self._before[pid] = (now, sample.cpu_s)
            at, cpu_s = before.get(pid, (now, 0.0))
            cores = max(0.0, sample.cpu_s - cpu_s) / (now - at) if now > at else None
            gpu, gpu_memory = gpus.get(pid, (None, None))
            found[pid] = Usage(
                None if cores is None else round(cores, 2), sample.memory, gpu, gpu_memory
            )
        return found


class Gpus:
    """Query of the GPU usage of processes through NVML.

    Args:
        nvml: the NVML module (default: pynvml, if it is installed and works).
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._tried = False

    def used_by(self, pids: Collection[int]) -> dict[int, Gpu]:
        """Return the GPU usage of each session leader. Processes that use no GPU are omitted."""
        if not self._tried:
            self._tried = True
            self._nvml = _started(self._nvml)
        found: dict[int, Gpu] = {}
        if self._nvml is None:
            return found
        count = 0
        with contextlib.suppress(self._nvml.NVMLError):  # a GPU or its driver has failed
            count = self._nvml.nvmlDeviceGetCount()
        for index in range(count):
            with contextlib.suppress(self._nvml.NVMLError):
                self._add(self._nvml.nvmlDeviceGetHandleByIndex(index), pids, found)
        return found

    def _add(self, gpu: Any, pids: Collection[int], found: dict[int, Gpu]) -> None:
        nvml, share = self._nvml, None
        running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        # some GPUs, such as MIG instances, do not support this query
        with contextlib.suppress(nvml.NVMLError):
            share = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
        for process in running:
            leader = process.pid
            if leader not in pids:
                leader = proc_stats.stat_of(process.pid).session
            if leader in pids:
                before, used = found.get(leader, (None, 0))
                shares = [each for each in (before, share) if each is not None]
                found[leader] = max(shares, default=None), used + (process.usedGpuMemory or 0)


def _started(nvml: Any) -> Any:
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


class UsageMeter:
    """Meter of the resource usage of the workers on one host.

    Must be called by one thread at a time. A call may wait for the driver of a GPU.
    """

    def __init__(self) -> None:
        self._rates = Rates()
        self._gpus = Gpus()

    def look(self, pids: Collection[int], now: float) -> dict[int, Usage]:
        """Return the usage of the given processes that are running.

        Raises:
            OSError: /proc cannot be read.
        """
        return self._rates.between(proc_stats.samples_of(pids), self._gpus.used_by(pids), now)
