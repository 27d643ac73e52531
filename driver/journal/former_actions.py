"""Reads actions of journals from before they said in a field what their text says. Pure.

Only what was written then is judged by its text, and only here.
"""

from __future__ import annotations

import re

from elastic.driver.events import Action, Fence, KillWorker, Report
from elastic.protocol.messages import Worker

_FENCES = {
    "it is frozen": Fence.FROZEN,
    "it is stuck": Fence.STUCK,
    "it is cut off": Fence.CUT_OFF,
    "its parameters differ": Fence.DIGEST,
    "its GPU ": Fence.GPU,
    "it did not call init()": Fence.LATE,
    "it did not become ready": Fence.LATE,
}
_UNKILLABLE = re.compile(r"(.+):(\d+)#(\d+) can't be killed within .* s: going on without it")


def completed(action: Action) -> Action:
    """With the fields that it has today."""
    match action:
        case KillWorker(worker, reason, None):
            return KillWorker(worker, reason, fence_of(reason))
        case Report("error", text, None) if found := _UNKILLABLE.fullmatch(text):
            return Report("error", text, Worker(found[1], int(found[2]), int(found[3])))
        case _:
            return action


def fence_of(reason: str) -> Fence | None:
    return next((kind for begin, kind in _FENCES.items() if reason.startswith(begin)), None)
