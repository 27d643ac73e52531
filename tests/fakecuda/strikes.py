"""Random faults for a job on fake GPUs, from a seed. Pure; `struck_job` injects them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

HOSTS = ("localhost", "127.0.0.2")
GPUS = 2  # per host
FULL = len(HOSTS) * GPUS  # workers

DEADLY = tuple(
    f"{what} in {where}"
    for what in ("death", "freeze")
    for where in ("init", "connect", "kernel", "launch")
)
BESIDE = {"slow copies": "copy:slow,ms=3", "slow aborts": "abort:slow,ms=800"}
HARMLESS = ("NCCL error", *(f"NCCL error with {each}" for each in (*BESIDE, "endless abort")))
KINDS = (
    *DEADLY,
    *HARMLESS,  # to workers
    *(each.replace("NCCL error", "death") for each in HARMLESS[1:]),
    "CUDA error",
    "CUDA errors of a host",
    "endless kernel",
    "endless copy",
)
SPARING = ("kernel:error", "abort:hang")  # actions that end no process at once
CODES = (214, 220, 700, 719)  # ECC, NVLink, an illegal access, a failed launch
IDLE_S = 30.0  # until a worker that waits for an endless copy is regarded as stuck


@dataclass(frozen=True)
class Strike:
    """One fault. ``rules``: of FAKE_FAULTS. Those that strike one process only name the file ONCE.``n``, n from 0."""

    kind: str
    rules: tuple[str, ...]
    once: int  # rules that strike once; when all have, the fault is there
    killed: int | None = None  # this rank is killed from outside at that time
    lost: int = 0  # workers, at the end
    # in addition to the time to connect, until the others continue training
    allowed_s: float = 10.0

    @property
    def acts(self) -> list[str]:
        """Return place and action of one-time rules, in their order: for example ``kernel:die``."""
        return [rule.split(",")[0] for rule in self.rules if "once=" in rule]

    @property
    def hangs(self) -> int | None:
        """Return the rank whose abort never ends. Its process is lost when a later world breaks."""
        for rule in self.rules:
            if rule.startswith("abort:hang,rank="):
                return int(rule.split(",")[1].removeprefix("rank="))
        return None

    def __str__(self) -> str:
        killed = "" if self.killed is None else f"; rank {self.killed} is killed then"
        return f"{self.kind}: {'; '.join(self.rules)}{killed}"


def strikes(
    seed: int, count: int, kinds: tuple[str, ...] = KINDS, *, sharded: bool = False
) -> Iterator[Strike]:
    """Each kind as often as every other one, in random order. The first ones are the same for every ``count``.

    ``sharded``: a new world creates one communicator, not two, and the training thread waits inside CUDA.
    """
    dice = random.Random(seed)
    left: list[str] = []
    for _ in range(count):
        if not left:
            left = dice.sample(kinds, len(kinds))
        yield _strike(left.pop(), dice, sharded)


def _strike(kind: str, dice: random.Random, sharded: bool) -> Strike:
    one, other = dice.sample(range(FULL), 2)  # ranks
    gpu = f"host={dice.choice(HOSTS)},device={dice.randrange(GPUS)}"
    soon, second = f"nth={dice.randint(1, 8)}", f"nth={dice.randint(1, 1 if sharded else 2)}"
    late = f"nth={dice.randint(1, 150)}"
    code = f"code={dice.choice(CODES)}"
    error, death = (f"kernel:{what},rank={other},{soon}" for what in ("error", "die"))
    if kind in DEADLY:
        what, _, where = kind.partition(" in ")
        act = "die" if what == "death" else "freeze"
        if where in ("init", "connect"):  # which a world does that has lost the one before
            return _all_once(kind, error, f"{where}:{act},rank={one},{second}", lost=1)
        return _all_once(kind, f"{where}:{act},rank={one},{soon}", lost=1)
    what, _, beside = kind.partition(" with ")
    if what in ("NCCL error", "death"):
        breaks, lost = (error, 0) if what == "NCCL error" else (death, 1)
        if beside == "endless abort":
            return _all_once(kind, f"abort:hang,rank={one}", breaks, lost=lost)
        return _all_once(kind, breaks, lasting=BESIDE.get(beside, ""), lost=lost)
    match kind:
        case "CUDA error":
            return _all_once(kind, f"work:error,{gpu},{late},{code}", lost=1)
        case "CUDA errors of a host":
            host, code = f"host={HOSTS[dice.randrange(2)]}", f"code={dice.choice(CODES)}"
            each = [f"work:error,{host},device={device},{code}" for device in range(GPUS)]
            return _all_once(kind, *each, lost=GPUS)
        case "endless kernel":
            strike = _all_once(kind, f"kernel:hang,rank={other},{soon}", lost=2)
            allowed_s = IDLE_S + 10 if sharded else 10.0
            return Strike(kind, strike.rules, 1, killed=one, lost=2, allowed_s=allowed_s)
        case "endless copy":
            return _all_once(kind, f"fetch:hang,{gpu},{late}", lost=1, allowed_s=IDLE_S + 10)
    raise AssertionError(f"no such kind of fault: {kind}")


def _all_once(
    kind: str, *rules: str, lasting: str = "", lost: int = 0, allowed_s: float = 10.0
) -> Strike:
    once = tuple(f"{rule},once=ONCE.{number}" for number, rule in enumerate(rules))
    lasts = (lasting,) if lasting else ()
    return Strike(kind, (*lasts, *once), len(rules), lost=lost, allowed_s=allowed_s)
