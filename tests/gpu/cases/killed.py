"""A rank dies at several places repeatedly: the time until the other continues, and leaked resources."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

from gpu.machine import Machine
from gpu.programs import Job, Note, spread
from gpu.results import Result

# What needs no kernel of two ranks can be tried with any NCCL.
ALONE = ("init", "before-connect")
TOGETHER = ("kernel", *ALONE, "own-kernel")
ROOM = {"driver_mb": 20.0, "allocated_mb": 1.0, "threads": 1.0}  # for growth
RAISED_S = 1.0
STEPPED_S = 5.0
GLOO_S = 5  # within it a communicator has to connect


def run(machine: Machine, result: Result, folder: Path) -> None:
    places = list(
        islice(
            cycle(TOGETHER if machine.ranks > 1 else ALONE),
            6 if machine.small or machine.ranks == 1 else 10,
        )
    )
    if machine.ranks == 1:
        result.leave_out("deaths in a kernel", machine.why_few)
    # A newcomer's CUDA context takes half a gigabyte: the survivor has looked at the memory before there is one.
    flags = f"--blacklist-cooldown-range 1.5 2 --gloo-timeout-seconds {GLOO_S}"
    # Two ranks that never come to share a communicator are no trouble to an NCCL that would refuse it.
    env = {"PLACES": ",".join(places), "SETTLE_S": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    with Job(machine, folder, "losing.py", np=2, flags=flags, **env) as job:
        try:
            job.done(130)
        finally:
            rounds = list(told(job))
            for name in ("raised_ms", "trained_on_ms"):
                for place in dict.fromkeys(places):
                    values = [
                        r[name] for r in rounds if r["place"] == place and r[name] is not None
                    ]
                    if values:
                        result.figure(f"{place}: {name}", spread(values))
            settled = job.notes("settled")
            for name in ("driver_mb", "torch_mb", "allocated_mb", "rss_mb", "threads"):
                result.figure(f"alone: {name}", [round(each[name]) for each in settled])
    assert len(rounds) == len(places) == len(settled), (places, rounds)
    check(machine, rounds)
    for name, room in ROOM.items():
        grown = growth(places, settled, name)
        assert grown <= room, f"{name} grew by {grown:g} in {len(places)} losses: {settled}"


def growth(places: list[str], settled: list[Note], name: str) -> float:
    """Return by how much a figure has grown at most between two losses at the same place.

    How much is left for a while depends on the place. The first loss is not compared, since it leaves what is used
    again: a context, modules, threads.
    """
    found = {
        place: [each[name] for each, of in zip(settled[1:], places[1:], strict=True) if of == place]
        for place in places
    }
    return float(max(values[-1] - values[0] for values in found.values() if len(values) > 1))


def told(job: Job) -> list[Note]:
    """Of each loss in turn: where, and how many ms after it the survivor's call raised, and it had made a step."""
    losses = job.notes("goes")
    ends = [each["at"] for each in losses[1:]] + [float("inf")]
    rounds = []
    for lost, end in zip(losses, ends, strict=True):
        found: Note = {"place": lost["place"], "at": lost["at"]}
        for name, what in (("raised_ms", "raised"), ("trained_on_ms", "stepped")):
            after = [
                each["at"] - lost["at"]
                for each in job.notes(what)
                if lost["at"] < each["at"] < end
                and ":0#" in each["worker"]
                and (what == "raised" or each["size"] == 1)
            ]
            found[name] = after[0] * 1e3 if after else None
        rounds.append(found)
    return rounds


def check(machine: Machine, rounds: list[Note]) -> None:
    for each in rounds:
        assert each["trained_on_ms"] is not None, f"nobody trained on after {each['place']}"
        assert each["trained_on_ms"] <= STEPPED_S * 1e3 * machine.time_factor, each
        if each["raised_ms"] is not None:
            # Less than GLOO_S: who holds Python's lock while NCCL connects is not told before that.
            assert each["raised_ms"] <= RAISED_S * 1e3 * min(machine.time_factor, 3.0), each
