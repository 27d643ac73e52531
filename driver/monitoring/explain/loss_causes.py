"""Causes of worker losses as data: the cause, the time, and the evidence. Pure: no I/O, no clock.

Most causes come from an event or from the driver's reason for a fence. Exceptions are parsed from the output of scripts
and libraries, and classified by class name and errno.
"""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass, field

from elastic import errors
from elastic.driver.events import ExitCause, WorkerExited, WorkerRaised
from elastic.driver.reasons import Reason, ReasonKind
from elastic.protocol.messages import Worker


class Cause(enum.Enum):
    """Cause of the loss of a worker."""

    EXCEPTION = "exception"  # the script raised an exception
    MISMATCH = "mismatch"  # the ranks submitted incompatible tensors
    # the structure of the worker's model or optimizer differs from that of the other workers
    STATE_MISMATCH = "state mismatch"
    MISSING_MODULE = "missing module"
    MEMORY_ERROR = "memory error"  # Python or torch failed to allocate memory
    GPU_MEMORY = "gpu memory"
    DISK_FULL = "disk full"
    # a write failed; torch does not report the reason, which is usually a full disk
    WRITE_FAILED = "write failed"
    GPU_ERROR = "gpu error"  # an error in CUDA or NCCL
    OUT_OF_MEMORY = "out of memory"  # the kernel's out-of-memory killer killed the worker
    SIGNAL = "signal"
    EXIT_CODE = "exit code"
    NOT_STARTED = "not started"
    FROZEN = "frozen"
    CUT_OFF = "cut off"
    STUCK = "stuck"
    GPU_HANGS = "gpu hangs"
    DAMAGED = "damaged"  # bits in the worker's memory or parameters had flipped
    MISCOMPUTED = "miscomputed"  # the worker's gradients were wrong
    # the worker exceeded its time limit for calling init() or for becoming ready
    TOO_SLOW = "too slow"
    DISCONNECTED = "disconnected"
    HOST_LOST = "host lost"
    LOST_PEER = "lost peer"  # caused by the loss of another worker
    SHARDS_LOST = "shards lost"  # caused by the loss of all workers that held certain shards
    # the worker's state was corrupted by the gradients of a worker whose memory was damaged
    SPOILT = "spoilt"


# Causes that count as consequences of another worker's loss, if such a loss is known.
FOLLOWS = frozenset({Cause.LOST_PEER, Cause.SHARDS_LOST, Cause.SPOILT})
FENCES = {
    ReasonKind.FROZEN: Cause.FROZEN,
    ReasonKind.CUT_OFF: Cause.CUT_OFF,
    ReasonKind.IDLE: Cause.STUCK,
    ReasonKind.BUSY: Cause.STUCK,
    ReasonKind.GPU_FAILED: Cause.GPU_ERROR,
    ReasonKind.GPU_HANGS: Cause.GPU_HANGS,
    ReasonKind.GPU_BEHIND: Cause.GPU_HANGS,
    ReasonKind.OTHER_DIGEST: Cause.DAMAGED,
    ReasonKind.DAMAGED: Cause.DAMAGED,
    ReasonKind.MISCOMPUTED: Cause.MISCOMPUTED,
    ReasonKind.NO_INIT: Cause.TOO_SLOW,
    ReasonKind.NOT_READY: Cause.TOO_SLOW,
    ReasonKind.CONNECTION_LOST: Cause.DISCONNECTED,
    ReasonKind.NOT_BACK: Cause.DISCONNECTED,
    ReasonKind.REJECTED: Cause.STATE_MISMATCH,
    ReasonKind.STRANDED: Cause.LOST_PEER,
    ReasonKind.SPOILT: Cause.SPOILT,
}


@dataclass(frozen=True)
class Death:
    """Loss of one worker, and its cause.

    Args:
        at: time of the first sign of the loss, in seconds on the journal's clock.
        rank: rank of the worker in its last world, or None if it never joined a world.
        size: size of the world that lost the worker, or 0 if it was not a member.
        what: the last line of an exception, the reason for a fence or a failed start, or the kernel's message.
        trace: traceback of an exception, or the end of the worker's output.
    """

    worker: Worker
    at: float
    cause: Cause
    rank: int | None = None
    code: int | None = None  # exit code as in WorkerExited
    what: str = ""
    trace: str = ""
    trained: bool = True  # whether the worker was a member of a world when it was lost
    size: int = 0
    # values that describe the reason for a fence
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def signal_name(self) -> str:
        """Name of the signal that killed the process, such as ``SIGKILL``, or an empty string."""
        return signal_name(self.code)


def signal_name(code: int | None) -> str:
    """Return the name of the signal that an exit code stands for, such as ``SIGKILL`` for -9, or an empty string."""
    if code is None or code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# ---- exceptions of scripts ------------------------------------------------------------------------------------------

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
# Once a process group exists, torch adds this prefix to each line.
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)


def kind_of(summary: str, trace: str) -> Cause:
    """Return the cause of a loss that an exception indicates.

    Args:
        summary: last line of the exception, such as ``ValueError: wrong``. The class name may include the module.
        trace: traceback of the exception.
    """
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
    """Return the last line of the last traceback in a worker's output, and that traceback.

    Both are empty if the output contains no traceback.
    """
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
    marks = (
        "During handling of the above exception",
        "the direct cause of the following exception",
    )
    if not any(mark in head[-200:] for mark in marks):
        return ""
    first = head.find(_TRACEBACK)
    return head[first:] if first >= 0 else ""


# ---- from events ----------------------------------------------------------------------------------------------------


def of_raised(event: WorkerRaised, at: float, rank: int | None) -> Death:
    """Return the loss of a worker whose script raised an exception."""
    cause = Cause.GPU_ERROR if event.hardware else kind_of(event.summary, event.traceback)
    if event.shards_lost:
        cause = Cause.SHARDS_LOST
    trace = event.traceback.rstrip()
    return Death(event.worker, at, cause, rank, what=event.summary, trace=trace)


def of_exit(event: WorkerExited, at: float, rank: int | None, *, connected: bool) -> Death | None:
    """Return the loss of a worker that exited without reporting an error, or None if its exit code is 0.

    Args:
        event: the exit.
        at: time of the exit, in seconds.
        rank: rank of the worker in its last world, or None.
        connected: whether the worker had connected to the driver.
    """
    worker, code, output = event.worker, event.code, event.output.rstrip()
    if not code:
        return None
    if code == -signal.SIGKILL:
        output = ""  # A process killed by SIGKILL cannot print the reason.
    if event.out_of_memory:
        limit = event.reason.partition("out of memory, ")[2]
        return Death(worker, at, Cause.OUT_OF_MEMORY, rank, code, limit, output, connected)
    if event.reason and not connected and code >= 0:
        return Death(worker, at, Cause.NOT_STARTED, rank, code, event.reason, output, False)
    if event.cause is ExitCause.LOST_DRIVER:
        what = "it had lost its driver"
        return Death(worker, at, Cause.DISCONNECTED, rank, code, what, trained=connected)
    summary, trace = last_exception(output)
    if summary and code > 0:
        cause = kind_of(summary, trace)
        return Death(worker, at, cause, rank, code, summary, trace, connected)
    cause = Cause.SIGNAL if code < 0 else Cause.EXIT_CODE
    return Death(worker, at, cause, rank, code, event.reason, output, connected)


def of_fence(worker: Worker, reason: Reason, at: float, rank: int | None) -> Death | None:
    """Return the loss of a worker that the driver killed.

    Returns None if the kill was not a fence, for example because the job is over or the worker had been asked to leave.
    """
    cause = FENCES.get(reason.kind)
    if cause is None:
        return None
    facts = {name: str(value) for name, value in reason.facts.items()}
    return Death(
        worker, at, cause, rank, what=str(reason), facts={"why": reason.kind.value} | facts
    )
