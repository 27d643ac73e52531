"""Decides whose GPU hangs, where all ranks of a group wait in it and nobody has died. Pure; `stuck` asks.

Each worker says of each group how many collectives it has launched, to how many its GPU has come, and how many have
ended. The first collective that has not ended everywhere is looked at:

    some rank has not launched it         nothing: that one works on its host, where `suspicion` judges it
    CUDA answers some ranks with errors   FAILED: they are to blame
    a minority has not arrived at it      GPU: theirs hang, once they have had as long again as the others took
    half have not arrived                 GPU: the same, but three times as long
    most or all have not arrived          UNCLEAR, after ``limit_s``: they may all have much to compute
    all have arrived                      NETWORK: the network, or NCCL

The last two single out nobody: the world is formed again, with new communicators. Where that was in vain, and a
minority is left that has not got to the end of what the others have, these are to blame.

A rank that is slow on its host has not launched, and one whose GPU is slow falls behind by less than it takes for a
step: neither is taken for one that hangs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.driver.reasons import Reason, Why, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Launches, Worker

DOUBT = 3  # times as long where less is known


class Hang(enum.Enum):
    FAILED = "failed"
    GPU = "gpu"
    NETWORK = "network"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Witness:
    """The report of one rank of a group, unchanged from ``since`` until ``said_at``."""

    worker: Worker
    launches: Launches
    since: float
    said_at: float


@dataclass(frozen=True)
class Finding:
    """``blamed``: who explains it; nobody, where nothing singles out a rank. ``number``: of the collective."""

    hang: Hang
    group: str
    number: int
    for_s: float
    blamed: tuple[Worker, ...] = ()


def judge(witnesses: Sequence[Witness], settings: Settings, before: int) -> Finding | None:
    """Find a hang in one group; None: not yet, or no hang. ``before``: worlds that hung since the last new commit."""
    told = [witness.launches for witness in witnesses]
    if not told or len(told) < told[0].size or settings.gpu_hang_s <= 0:
        return None  # a rank is not there, or waits for something else
    number = min(each.done for each in told) + 1
    if any(each.launched < number for each in told):
        return None
    failed = [w for w in witnesses if w.launches.failed]
    behind = [w for w in witnesses if w.launches.arrived < number and w not in failed]
    if failed and len(failed) < len(witnesses):
        hang, blamed, patience_s = Hang.FAILED, failed, settings.gpu_hang_s
    elif 2 * len(behind) > len(witnesses):
        hang, blamed, patience_s = Hang.UNCLEAR, [], settings.gpu_limit_s
    elif behind:
        usual_s = max(each.took_s for each in told)
        hang, blamed, patience_s = Hang.GPU, behind, max(settings.gpu_hang_s, usual_s)
        if 2 * len(behind) == len(witnesses):
            patience_s *= DOUBT
    else:
        hang, blamed = Hang.NETWORK, _left_behind(witnesses, number) if before else []
        patience_s = DOUBT * settings.gpu_hang_s * 2**before  # a slow network may take long
    # The blamed have had their time since the last of the others came.
    since = max(witness.since for witness in witnesses)
    for_s = min(witness.said_at for witness in blamed or witnesses) - since
    if for_s < min(patience_s, settings.gpu_limit_s):
        return None
    workers = tuple(witness.worker for witness in blamed)
    return Finding(hang, told[0].group, number, for_s, workers)


def _left_behind(witnesses: Sequence[Witness], number: int) -> list[Witness]:
    left = [witness for witness in witnesses if witness.launches.done < number]
    return left if 2 * len(left) < len(witnesses) else []


def hang_of_one(finding: Finding) -> Reason:
    """Why a worker is fenced whose GPU explains that all wait."""
    kinds = {Hang.FAILED: Why.GPU_FAILED, Hang.GPU: Why.GPU_HANGS}
    kind = kinds.get(finding.hang, Why.GPU_BEHIND)
    return because(kind, for_s=finding.for_s, number=finding.number, group=finding.group)


def hang_of_all(finding: Finding, before: int) -> Reason:
    """Where nobody is to blame. ``before``: worlds that hung since the last new commit."""
    kind = Why.NETWORK_HANGS if finding.hang is Hang.NETWORK else Why.GPUS_HANG
    number, group, for_s = finding.number, finding.group, finding.for_s
    return because(kind, for_s=for_s, number=number, group=group, before=before)
