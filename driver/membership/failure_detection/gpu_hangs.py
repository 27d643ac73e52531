"""Detection of hung GPUs while all ranks of a process group wait and no worker has exited. Pure; used by `stuck`.

For each process group, every worker reports how many collectives it has launched, how many of them its GPU has started,
and how many have completed. The first collective that has not completed on all ranks is examined:

    some rank has not launched it         none: that rank is busy on the CPU, and `suspicion` handles it
    CUDA returns errors on some ranks     FAILED: these ranks are blamed
    a minority has not reached it         GPU: their GPUs hang, once the delay exceeds that of the slowest launch so far
    half have not reached it              GPU: the same, with a time limit three times as long
    most or all have not reached it       UNCLEAR, after ``limit_s``: all may have long computations
    all have reached it                   NETWORK: the network, or NCCL

UNCLEAR and NETWORK blame no rank: a new world is formed, with new communicators. If the next world hangs as well, and
only a minority of the ranks has not completed the collective, this minority is blamed.

Slow ranks are not mistaken for hangs: a rank that is slow on the CPU has not launched the collective, and a rank with a
slow GPU lags by less than one step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Launches, Worker

DOUBT = 3  # factor by which the time limit is extended when the evidence is weak


class Hang(enum.Enum):
    FAILED = "failed"
    GPU = "gpu"
    NETWORK = "network"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class RankReport:
    """GPU progress of one rank in a process group, as last reported.

    The progress did not change between ``since`` and ``reported_at``, which are times in seconds on the driver's clock.
    """

    worker: Worker
    launches: Launches
    since: float
    reported_at: float


@dataclass(frozen=True)
class HangFinding:
    """Detected hang in one process group.

    Args:
        hang: kind of the hang.
        group: name of the group.
        number: sequence number, within the group, of the collective that does not complete.
        for_s: duration of the hang, in seconds.
        blamed: workers with a hung GPU. Empty if the evidence identifies none.
    """

    hang: Hang
    group: str
    number: int
    for_s: float
    blamed: tuple[Worker, ...] = ()


def judge(witnesses: Sequence[RankReport], settings: Settings, before: int) -> HangFinding | None:
    """Return the hang of one process group, or None if no hang is detected.

    Args:
        witnesses: the latest report of each rank of the group.
        settings: settings of the job.
        before: number of worlds that have hung since the last new commit.
    """
    launches = [witness.launches for witness in witnesses]
    if not launches or len(launches) < launches[0].size or settings.gpu_hang_s <= 0:
        return None  # No verdict: a rank has not reported, or waits in another process group.
    number = min(each.done for each in launches) + 1
    if any(each.launched < number for each in launches):
        return None
    failed = [w for w in witnesses if w.launches.failed]
    behind = [w for w in witnesses if w.launches.arrived < number and w not in failed]
    if failed and len(failed) < len(witnesses):
        hang, blamed, patience_s = Hang.FAILED, failed, settings.gpu_hang_s
    elif 2 * len(behind) > len(witnesses):
        hang, blamed, patience_s = Hang.UNCLEAR, [], settings.gpu_limit_s
    elif behind:
        usual_s = max(each.took_s for each in launches)
        hang, blamed, patience_s = Hang.GPU, behind, max(settings.gpu_hang_s, usual_s)
        if 2 * len(behind) == len(witnesses):
            patience_s *= DOUBT
    else:
        hang, blamed = Hang.NETWORK, _left_behind(witnesses, number) if before else []
        # A slow network can delay a collective without a hang, so the limit doubles with each hang.
        patience_s = DOUBT * settings.gpu_hang_s * 2**before
    # The hang began after the latest progress of any rank.
    since = max(witness.since for witness in witnesses)
    for_s = min(witness.reported_at for witness in blamed or witnesses) - since
    if for_s < min(patience_s, settings.gpu_limit_s):
        return None
    workers = tuple(witness.worker for witness in blamed)
    return HangFinding(hang, launches[0].group, number, for_s, workers)


def _left_behind(witnesses: Sequence[RankReport], number: int) -> list[RankReport]:
    left = [witness for witness in witnesses if witness.launches.done < number]
    return left if 2 * len(left) < len(witnesses) else []


def hang_of_one(finding: HangFinding) -> Reason:
    """Return the reason for fencing a worker with a hung GPU."""
    kinds = {Hang.FAILED: ReasonKind.GPU_FAILED, Hang.GPU: ReasonKind.GPU_HANGS}
    kind = kinds.get(finding.hang, ReasonKind.GPU_BEHIND)
    return because(kind, for_s=finding.for_s, number=finding.number, group=finding.group)


def hang_of_all(finding: HangFinding, before: int) -> Reason:
    """Return the reason for ending a world whose hang cannot be attributed to one worker.

    Args:
        finding: the hang.
        before: number of worlds that have hung since the last new commit.
    """
    kind = ReasonKind.NETWORK_HANGS if finding.hang is Hang.NETWORK else ReasonKind.GPUS_HANG
    number, group, for_s = finding.number, finding.group, finding.for_s
    return because(kind, for_s=for_s, number=number, group=group, before=before)
