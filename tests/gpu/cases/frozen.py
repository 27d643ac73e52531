"""A rank is stopped, not dead: the driver fences it after 2 s, and the other rank's training thread is free
immediately.
"""

from __future__ import annotations

from pathlib import Path

from gpu.cases.killed import told
from gpu.machine import Machine
from gpu.programs import RETURN, Job
from gpu.results import Result

CONNECT_S = 5  # --gloo-timeout-seconds, and so TORCH_NCCL_NONBLOCKING_TIMEOUT
LEASE_S = 2.0
FREE_S = (
    1.5  # from the fence to the next generation's first step, its first copy of the model included
)
GONE_S = CONNECT_S + 2


def run(machine: Machine, result: Result, folder: Path) -> None:
    places = ["init", "kernel"] if machine.ranks > 1 else ["init"]
    if machine.ranks == 1:
        result.leave_out("a stop in a kernel", machine.why_few)
    env = {
        "PLACES": ",".join(places),
        "SIGNAL": "SIGSTOP",
        "SETTLE_S": str(GONE_S + 1),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    flags = f"{RETURN} --gloo-timeout-seconds {CONNECT_S}"
    with Job(machine, folder, "losing.py", np=2, flags=flags, **env) as job:
        job.done(70)
        rounds = told(job)
        counts = job.notes("threads")
        settled = job.notes("settled")
    most = settled[0]["threads"] + 1  # one may be idle
    for each, end in zip(rounds, settled, strict=True):
        result.figure(f"{each['place']}: from the stop to the next step, ms", each["trained_on_ms"])
        assert each["trained_on_ms"] is not None, each
        assert each["trained_on_ms"] <= (LEASE_S + FREE_S) * 1e3 * machine.time_factor, each
        free = each["at"] + each["trained_on_ms"] / 1e3
        after = [count for count in counts if free < count["at"] <= end["at"]]
        too_many = [number for number, count in enumerate(after) if count["count"] > most]
        assert not too_many or too_many[-1] + 1 < len(after), f"threads stay: {after}, not {most}"
        gone_s = after[too_many[-1] + 1]["at"] - free if too_many else 0.0
        result.figure(f"{each['place']}: threads gone after that, s", round(gone_s, 2))
        result.figure(f"{each['place']}: threads left", end["threads"])
        assert gone_s <= GONE_S * machine.time_factor, after
    if len(settled) > 1:
        assert settled[-1]["threads"] <= settled[0]["threads"] + 1, settled
