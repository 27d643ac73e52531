"""Resource usage of workers: rates between samples, and GPUs as NVML reports their processes."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from elastic.driver.output_interfaces import Usage
from elastic.driver.processes import proc_stats
from elastic.driver.processes.proc_stats import GONE, ProcSample, parse_statm
from elastic.driver.processes.usage_meter import Gpus, Rates, UsageMeter


def sample(cpu_s: float, memory: int = 4096, state: str = "S") -> ProcSample:
    return ProcSample(state, cpu_s, 0, traced=False, memory=memory)


def test_cores_are_processor_time_per_second_since_the_last_sample():
    rates = Rates()
    assert rates.between({7: sample(10.0)}, {}, 100.0) == {7: Usage(None, 4096)}
    assert rates.between({7: sample(17.5), 8: sample(1.0)}, {}, 105.0) == {
        7: Usage(1.5, 4096),
        8: Usage(None, 4096),
    }


def test_exited_process_has_no_usage_and_a_reused_process_id_restarts():
    rates = Rates()
    rates.between({7: sample(10.0)}, {}, 100.0)
    assert rates.between({7: sample(0.0, 0, GONE)}, {}, 105.0) == {}
    assert rates.between({7: sample(1.0)}, {}, 110.0) == {7: Usage(None, 4096)}


def test_reaped_children_that_leave_the_session_cause_no_negative_rate():
    rates = Rates()
    rates.between({7: sample(10.0)}, {}, 100.0)
    assert rates.between({7: sample(9.0)}, {}, 105.0)[7].cores == 0.0


class NVMLError(Exception):
    pass


class Nvml:
    """Two GPUs; ``broken``: the second does not answer; ``part``: the first has no rates, as with MIG."""

    NVMLError = NVMLError

    broken = part = missing = lost = False

    def __init__(self, *kinds: str, pid: int | None = None) -> None:
        self.pid = pid or os.getpid()
        for kind in kinds:
            setattr(self, kind, True)

    def nvmlInit(self) -> None:
        if self.missing:
            raise NVMLError("no driver")

    def nvmlDeviceGetCount(self) -> int:
        if self.lost:
            raise NVMLError("lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1 and self.broken:
            raise NVMLError("lost")
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[SimpleNamespace]:
        own = SimpleNamespace(pid=self.pid, usedGpuMemory=1000 + gpu)
        return [own, SimpleNamespace(pid=2**22 + 1, usedGpuMemory=77)]  # not in our container

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        if gpu == 0 and self.part:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=30 + 60 * gpu)


@pytest.mark.parametrize(
    ("nvml", "used"),
    [(Nvml(), (0.9, 2001)), (Nvml("broken"), (0.3, 1000)), (Nvml("broken", "part"), (None, 1000))],
)
def test_worker_has_the_memory_of_all_its_gpus_and_the_rate_of_the_busiest(nvml, used):
    assert Gpus(nvml).used_by({os.getpid()}) == {os.getpid(): used}


def test_process_in_a_workers_session_counts_for_the_worker():
    session = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    with session:
        assert session.stdout is not None
        nvml = Nvml(pid=int(session.stdout.readline()))
        found = Gpus(nvml).used_by({session.pid})
        os.killpg(session.pid, signal.SIGKILL)
    assert found == {session.pid: (0.9, 2001)}


@pytest.mark.parametrize("kind", ["missing", "lost"])
def test_gpu_usage_is_unknown_without_a_driver(kind):
    assert Gpus(Nvml(kind)).used_by({os.getpid()}) == {}


def test_memory_pages_of_a_process_are_parsed():
    assert parse_statm(b"9000 700 200 1 0 90 0\n") == (700, 200)
    assert parse_statm(b"") == (0, 0)


def test_this_process_can_be_sampled():
    leader = os.getsid(0)
    if proc_stats.stat_of(leader).state == GONE:
        pytest.skip("the leader of this session is in another namespace")
    found = UsageMeter().look({leader}, 1.0)
    assert found[leader].memory > 1 << 20 and found[leader].cores is None
