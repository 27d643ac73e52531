"""Exceptions that interrupt training, and errors reported to users. Pure: no I/O, no clock.

Bugs in this package raise AssertionError instead.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

# Maximum number of characters of an exception in a log line. The traceback contains the full text.
SUMMARY_LIMIT = 1000
# For each class, the subclass that is created instead of it in scripts written for Horovod. See `horovod_errors`.
raised_as: dict[type[Interrupted], type[Interrupted]] = {}


class Interrupted(BaseException):
    """Base class of the exceptions that return control from user code to ``elastic.run``.

    These exceptions are not errors. Do not catch them in user code.

    The class derives from ``BaseException``, so that ``except RuntimeError:`` in user code, as for out-of-memory
    errors, does not catch them by accident.
    """

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(raised_as.get(cls, cls), *args)


class PeerLost(Interrupted):
    """Interruption by a failed collective. ``elastic.run`` restores the last commit and joins the next world."""


class WorldChanging(Interrupted):
    """Interruption by a planned change of the world.

    Only ``commit()`` and ``check_host_updates()`` raise this exception, so no work is lost.
    """


class HorovodInternalError(RuntimeError):
    """Horovod's error for a failed collective. Raise it under ``elastic.run`` to restore the last commit and rejoin."""


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod's exception for a change of hosts. Raise it under ``elastic.run`` to rejoin with the current state.

    Args:
        skip_sync: accepted for compatibility with Horovod. It has no effect on whether the state is copied.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type[HostsUpdatedInterrupt], tuple[bool]]:
        return type(self), (self.skip_sync,)


class LeaveRequested(Interrupted):
    """Interruption of a leaving worker at a safepoint. ``elastic.run`` ends the process."""


class ElasticError(Exception):
    """Base class of all errors that are reported to users."""


class NotInitialized(ElasticError, ValueError):
    """Error raised when a function that needs the world is called before ``init()``."""


class StateMismatch(ElasticError):
    """Error raised when this worker's model, optimizer or state differs from that of the running world."""


class ShardLost(ElasticError):
    """Error raised when shards of a sharded state are lost, because no worker holds them.

    The job ends unless a checkpoint exists.

    Args:
        lost: for each missing shard of the newest commit: its number, the number of shards, and the hosts that held it.
    """

    def __init__(self, lost: Sequence[tuple[int, int, Sequence[str]]]) -> None:
        self.lost = [(shard, shards, tuple(hosts)) for shard, shards, hosts in lost]
        found = "; ".join(
            f"shard {shard} of {shards} was on {', '.join(dict.fromkeys(hosts)) or 'its own worker only'}"
            for shard, shards, hosts in self.lost
        )
        super().__init__(
            "the state is fully sharded, and part of it was lost with its workers: "
            f"{found or 'no commit was made'};"
            " raise copies of elastic.TorchState, so that more workers can be lost at once"
        )

    def __reduce__(self) -> tuple[type[ShardLost], tuple[list[tuple[int, int, tuple[str, ...]]]]]:
        return type(self), (self.lost,)


class GradientsDiffer(ElasticError):
    """Error raised when ranks computed different gradients of one shard, and a vote cannot identify the correct ones.

    See `elastic.Shards`.

    Args:
        step: step of the gradients.
        shard: shard of the gradients.
        computed: rank and digest of each computation, in the order of the computations.
    """

    def __init__(self, step: int, shard: int, computed: Sequence[tuple[int, str]]) -> None:
        self.step, self.shard = step, shard
        self.computed = [*computed]
        found = ", ".join(f"{digest} on rank {rank}" for rank, digest in computed)
        super().__init__(
            f"the gradients of shard {shard} in step {step} differ, and no two ranks agree: {found}. Either one of"
            " these ranks computes wrongly, so test their hosts, or the model is not deterministic"
        )

    def __reduce__(self) -> tuple[type[GradientsDiffer], tuple[int, int, list[tuple[int, str]]]]:
        return type(self), (self.step, self.shard, self.computed)


class JobFailed(ElasticError, RuntimeError):
    """Error raised when a launched job failed. The message names rank, host and exit code.

    This is also a RuntimeError, which callers of ``horovod.run`` catch.
    """


class ScriptMistakes(ElasticError):
    """Error raised with ``--strict`` if the script checks find a mistake. The job exits with code 2."""


class RequestRefused(ElasticError):
    """Error raised when a running job refuses a request. The message gives the reason."""


class JobOver(JobFailed):
    """Error raised in a worker when its job has failed.

    The driver has already reported the reason, so the worker exits without a traceback.
    """


class DeviceLost(ElasticError):
    """Error raised when a GPU does not respond or has reported a fatal error. The process that uses it must exit."""


class DriverLost(ElasticError):
    """Error raised when the connection to the driver failed and this worker cannot continue without it."""


class WorkerOrphaned(JobFailed, DriverLost):
    """Error raised when the job has failed and this worker, having lost its driver, reports the reason itself."""


class Differing(NamedTuple):
    """Record of a group whose ranks called different collectives.

    ``key`` identifies the group on all its ranks and is unique in their world.
    """

    key: str
    rank: int
    size: int


class CollectiveFailed(HorovodInternalError):
    """Error raised when a collective of one group failed or was aborted.

    The runtime converts the error to ``PeerLost`` if the job can recover.

    In a static job, the error reaches the script, because the lost worker is not replaced.

    Attributes:
        aborted: whether the group was aborted, by this or another rank. The cause is then known only to the rank that
            detected it.
        ended: the rank whose process exited, if known.
        differs: the group, if the failure is due to ranks that called different collectives, otherwise None.
        late: whether a rank did not arrive in time.
        rank: rank (within the group) of the worker that caused the failure: it left, exited, made a different call or
            was late. None if unknown.
        awaited: key in the rendezvous store for which ranks waited.
    """

    def __init__(
        self,
        *args: object,
        aborted: bool = False,
        ended: int | None = None,
        differs: Differing | None = None,
        late: bool = False,
        rank: int | None = None,
        awaited: str = "",
    ) -> None:
        super().__init__(*args)
        self.aborted = aborted
        self.ended = ended
        self.differs = differs
        self.late = late
        self.rank = rank
        self.awaited = awaited

    def again(self) -> CollectiveFailed:
        """Return a copy of the error, because each waiting call raises its own copy."""
        return CollectiveFailed(
            *self.args,
            aborted=self.aborted,
            ended=self.ended,
            differs=self.differs,
            late=self.late,
            rank=self.rank,
            awaited=self.awaited,
        )


class TensorMismatch(ElasticError, HorovodInternalError):
    """Error raised on every rank when ranks submitted mismatched tensors under one name.

    The message names the difference.

    The class is a HorovodInternalError, but ``elastic.run`` does not recover from it, because the same code would
    submit the same tensors again. The error ends the worker with a traceback.

    Args:
        calls: different calls of the ranks, as `elastic.protocol.calls.Called`.
    """

    calls: tuple[Any, ...] = ()

    def __init__(self, *args: object, calls: Sequence[Any] = ()) -> None:
        super().__init__(*args)
        self.calls = tuple(calls)

    def again(self) -> TensorMismatch:
        """Return a copy of the error, because each waiting call raises its own copy."""
        return TensorMismatch(*self.args, calls=self.calls)


class Invalid(ElasticError, ValueError):
    """Error raised for invalid input, such as a flag, a file or an argument. The message contains the remedy."""


class Unsupported(Invalid, HorovodInternalError, NotImplementedError):
    """Error raised when a collective does not support the request, such as a reducescatter of maxima.

    The error is raised before any tensor is sent.

    Horovod raises HorovodInternalError or NotImplementedError in some of these cases. ``elastic.run`` does not recover
    from this error, because the same code would make the same request again.
    """


class Fixed(enum.Enum):
    """Kind of an object whose layout is fixed for one world. See `NotElastic`."""

    PROCESS_GROUP = "process group of some ranks"
    PARAMETERS = "sharded parameters"
    MODULE = "fully sharded module"
    OPTIMIZER = "sharded optimizer"
    REPLICA = "model in DistributedDataParallel"
    JAX_PROGRAM = "program of jax.distributed"


class NotElastic(Invalid, NotImplementedError):
    """Error raised when the script uses an object that cannot be updated when the world changes.

    The error is raised before the training starts, or before the next update after a change. It ends the worker,
    because the same script would use the same object again.

    Args:
        kind: kind of the object.
    """

    def __init__(self, message: str, kind: Fixed) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[NotElastic], tuple[str, Fixed]]:
        return type(self), (str(self), self.kind)


class NotReduced(Invalid):
    """Error raised when a DDP model trains a parameter that was added after DDP was created.

    DDP does not reduce the gradient of such a parameter, so ranks would diverge.

    Args:
        parameter: name of the parameter, as in ``model.layer.weight``.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[type[NotReduced], tuple[str, str]]:
        return type(self), (str(self), self.parameter)


class DuplicateName(Invalid):
    """Error raised when a collective is submitted under the name of a collective that is still in flight."""


class UnsupportedType(Invalid, TypeError):
    """Error raised when a collective does not support tensors of this dtype. Horovod raises ValueError in this case."""


class NotPicklable(Invalid, TypeError):
    """Error raised when an object that belongs to its process, such as a state, is pickled or copied."""


class StaleValueWarning(UserWarning):
    """Warning that a value in the script was computed for an earlier world and is not updated.

    Such a value is, for example, a learning-rate schedule or an environment variable. The message contains the remedy.
    """


def summary_of(error: BaseException) -> str:
    """Return the class and the message of an error, as in ``OSError: the first line of its message``.

    The result has up to `SUMMARY_LIMIT` characters and does not contain notes.

    If the message is empty, return only the name of the class.
    """
    try:
        text = str(error)
    except Exception as failure:  # The exception's __str__ failed, so only its class is known.
        text = f"its __str__ raised {type(failure).__name__}"
    lines = filter(None, map(str.strip, text.splitlines()))
    return shortened(": ".join([type(error).__name__, *itertools.islice(lines, 1)]))


def shortened(line: str) -> str:
    """Shorten a line for the log by omitting its middle."""
    if len(line) <= SUMMARY_LIMIT:
        return line
    half = SUMMARY_LIMIT // 2
    return f"{line[:half]} ... {len(line) - 2 * half} characters ... {line[-half:]}"
