"""Why a worker was lost, as values: what it died of, and when. Pure.

Most causes are kinds of the driver's own: an event, or the reason of a fence. What a script and its libraries say is
foreign text, and there is nothing else to go by: an exception is known by the name of its class, and by the number that
the kernel gave to its error.
"""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass, field

from elastic import errors
from elastic.driver.events import WorkerExited, WorkerRaised
from elastic.driver.reasons import Reason, Why
from elastic.protocol.messages import Worker


class Cause(enum.Enum):
    """What a worker was lost by."""

    EXCEPTION = "exception"  # of the script
    MISMATCH = "mismatch"  # the ranks submitted what does not fit together
    STATE_MISMATCH = "state mismatch"  # its model or optimizer is not that of the others
    MISSING_MODULE = "missing module"
    MEMORY_ERROR = "memory error"  # Python, or torch's allocator, got no memory
    GPU_MEMORY = "gpu memory"
    DISK_FULL = "disk full"
    WRITE_FAILED = "write failed"  # torch does not say why: mostly a full disk
    GPU_ERROR = "gpu error"  # CUDA or NCCL
    OUT_OF_MEMORY = "out of memory"  # the kernel has killed it
    SIGNAL = "signal"
    EXIT_CODE = "exit code"
    NOT_STARTED = "not started"
    FROZEN = "frozen"
    CUT_OFF = "cut off"
    STUCK = "stuck"
    GPU_HANGS = "gpu hangs"
    DAMAGED = "damaged"  # bits of its memory, or of its parameters, have changed
    TOO_SLOW = "too slow"  # to call init(), to become ready, to leave
    DISCONNECTED = "disconnected"
    HOST_LOST = "host lost"
    LOST_PEER = "lost peer"  # it follows from another's loss
    SHARDS_LOST = (
        "shards lost"  # it follows from the loss of all that held some shards of its state
    )
    SPOILT = "spoilt"  # by the gradients of one whose memory was damaged


# From the loss of another, where that is known.
FOLLOWS = frozenset({Cause.LOST_PEER, Cause.SHARDS_LOST, Cause.SPOILT})
FENCES = {
    Why.FROZEN: Cause.FROZEN,
    Why.CUT_OFF: Cause.CUT_OFF,
    Why.IDLE: Cause.STUCK,
    Why.BUSY: Cause.STUCK,
    Why.GPU_FAILED: Cause.GPU_ERROR,
    Why.GPU_HANGS: Cause.GPU_HANGS,
    Why.GPU_BEHIND: Cause.GPU_HANGS,
    Why.OTHER_DIGEST: Cause.DAMAGED,
    Why.DAMAGED: Cause.DAMAGED,
    Why.NO_INIT: Cause.TOO_SLOW,
    Why.NOT_READY: Cause.TOO_SLOW,
    Why.NOT_LEFT: Cause.TOO_SLOW,
    Why.CONNECTION_LOST: Cause.DISCONNECTED,
    Why.NOT_BACK: Cause.DISCONNECTED,
    Why.REJECTED: Cause.STATE_MISMATCH,
    Why.STRANDED: Cause.LOST_PEER,
    Why.SPOILT: Cause.SPOILT,
}


@dataclass(frozen=True)
class Death:
    """``at``: seconds on the journal's clock, of the first sign. ``rank``: in its last world, if it was in any.
    ``size``: of the world that has lost it; 0: it was no member.

    ``what``: an exception's last line, why it was fenced or could not start, the kernel's words. ``trace``: of an
    exception, or the end of what it wrote.
    """

    worker: Worker
    at: float
    cause: Cause
    rank: int | None = None
    code: int | None = None  # as in WorkerExited
    what: str = ""
    trace: str = ""
    trained: bool = True  # it was in a world
    size: int = 0
    facts: dict[str, str] = field(default_factory=dict)  # of a fence

    @property
    def signal_name(self) -> str:
        """``SIGKILL``; empty where it was no signal."""
        return signal_name(self.code)


def signal_name(code: int | None) -> str:
    """``SIGKILL`` of -9; empty where it is no signal's."""
    if code is None or code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# ---- a script's own words -------------------------------------------------------------------------------------------

_MEMORY = {"MemoryError", "_ArrayMemoryError"}
_PEER = {
    each.__name__
    for each in (
        errors.CollectiveFailed,
        errors.PeerLost,
        errors.HorovodInternalError,
        errors.JobFailed,
        errors.JobOver,
    )
}
_CPU_MEMORY = re.compile(r"DefaultCPUAllocator: (can't|not enough)|std::bad_alloc")
_CUDA_MEMORY = re.compile(r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_CUDA = re.compile(r"CUDA error|cuDNN error|CUBLAS_STATUS|NCCL error|ncclUnhandled|ncclSystemError")
_NO_SPACE = re.compile(r"\[Errno 28\]|No space left on device")
_WRITE_FAILED = re.compile(
    r"basic_ios::clear: iostream error|PytorchStreamWriter failed writing|unexpected pos \d+ vs"
)
_LAST_LINE = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: |$)")
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(
    r"^\[rank\d+\]: ", re.MULTILINE
)  # torch writes it before each line, once there is a process group


def kind_of(summary: str, trace: str) -> Cause:
    """What an exception was: ``summary`` is its last line, ``ValueError: wrong``, with or without the module."""
    named = _LAST_LINE.match(summary)
    name = named["name"].rpartition(".")[2] if named else ""
    if _NO_SPACE.search(summary) or _NO_SPACE.search(trace):
        return Cause.DISK_FULL
    if _WRITE_FAILED.search(summary):
        return Cause.WRITE_FAILED
    if name == "OutOfMemoryError" or _CUDA_MEMORY.search(summary):
        return Cause.GPU_MEMORY
    if name in _MEMORY or _CPU_MEMORY.search(summary):
        return Cause.MEMORY_ERROR
    if name == errors.DeviceLost.__name__ or _CUDA.search(summary):
        return Cause.GPU_ERROR
    if name in ("ModuleNotFoundError", "ImportError"):
        return Cause.MISSING_MODULE
    if name == errors.TensorMismatch.__name__:
        return Cause.MISMATCH
    if name == errors.StateMismatch.__name__:
        return Cause.STATE_MISMATCH
    if name in _PEER:
        return Cause.LOST_PEER
    return Cause.EXCEPTION


def last_exception(output: str) -> tuple[str, str]:
    """The last traceback in what a worker wrote, and its last line; empty where there is none."""
    head, found, tail = _RANK.sub("", output).rpartition(_TRACEBACK)
    if not found:
        return "", ""
    lines = tail.splitlines()
    for index, line in enumerate(lines[1:], start=1):
        if line and not line[0].isspace():
            trace = "\n".join([_TRACEBACK, *lines[1 : index + 1]])
            return line.strip(), _with_causes(head) + trace
    return "", ""


def _with_causes(head: str) -> str:
    """The tracebacks that lead to it, where Python has said that they do."""
    marks = (
        "During handling of the above exception",
        "the direct cause of the following exception",
    )
    if not any(mark in head[-200:] for mark in marks):
        return ""
    first = head.find(_TRACEBACK)
    return head[first:] if first >= 0 else ""


# ---- from an event --------------------------------------------------------------------------------------------------


def of_raised(event: WorkerRaised, at: float, rank: int | None) -> Death:
    """User code has raised."""
    cause = Cause.GPU_ERROR if event.hardware else kind_of(event.summary, event.traceback)
    if event.shards_lost:
        cause = Cause.SHARDS_LOST
    trace = event.traceback.rstrip()
    return Death(event.worker, at, cause, rank, what=event.summary, trace=trace)


def of_exit(event: WorkerExited, at: float, rank: int | None, *, connected: bool) -> Death | None:
    """A process has ended by itself, and had not said why before. None: it has ended well."""
    worker, code, output = event.worker, event.code, event.output.rstrip()
    if not code:
        return None
    if code == -signal.SIGKILL:
        output = ""  # it could not say why
    if event.out_of_memory:
        limit = event.reason.partition("out of memory, ")[2]
        return Death(worker, at, Cause.OUT_OF_MEMORY, rank, code, limit, output, connected)
    if event.reason and not connected and code >= 0:
        return Death(worker, at, Cause.NOT_STARTED, rank, code, event.reason, output, False)
    summary, trace = last_exception(output)
    if summary and code > 0:
        cause = kind_of(summary, trace)
        return Death(worker, at, cause, rank, code, summary, trace, connected)
    cause = Cause.SIGNAL if code < 0 else Cause.EXIT_CODE
    return Death(worker, at, cause, rank, code, event.reason, output, connected)


def of_fence(worker: Worker, reason: Reason, at: float, rank: int | None) -> Death | None:
    """The driver kills it. None: because the job is over, or it was to leave."""
    cause = FENCES.get(reason.kind)
    if cause is None:
        return None
    facts = {name: str(value) for name, value in reason.facts.items()}
    return Death(
        worker, at, cause, rank, what=str(reason), facts={"why": reason.kind.value} | facts
    )
