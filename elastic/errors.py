"""What can go wrong, in three kinds: an interruption, an error a user may see, a bug (an ``assert``). Pure."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

SUMMARY_LIMIT = 1000  # characters of an exception in a line of a log; its traceback has all
# For scripts written for Horovod: the subclass that is made wherever one of these is. See `horovod_errors`.
raised_as: dict[type[Interrupted], type[Interrupted]] = {}


class Interrupted(BaseException):
    """Unwinds user code to ``elastic.run``. Not an error; do not catch it.

    A ``BaseException``, so that a user's ``except RuntimeError:`` around an out-of-memory
    handler cannot swallow a change of the world.
    """

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(raised_as.get(cls, cls), *args)


class PeerLost(Interrupted):
    """A collective broke: restore the last commit, then rejoin."""


class WorldChanging(Interrupted):
    """A planned change: raised by ``commit()`` and ``check_host_updates()``, so nothing is lost."""


class HorovodInternalError(RuntimeError):
    """A collective failed. Raised by a script under ``elastic.run``: restore the last commit and rejoin."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed. Raised by a script under ``elastic.run``: rejoin with the state as it is.

    ``skip_sync``: kept because scripts set and read it; whether state is copied is decided from the commits.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type[HostsUpdatedInterrupt], tuple[bool]]:
        return type(self), (self.skip_sync,)


class LeaveRequested(Interrupted):
    """This worker was asked to leave and has stopped at an agreed check: end the process."""


class ElasticError(Exception):
    """Base of the errors that users may see."""


class NotInitialized(ElasticError, ValueError):
    """A query or collective was called before ``init()``."""


class StateMismatch(ElasticError):
    """This worker's model, optimizer or state differs from that of the running world."""


class ShardLost(ElasticError):
    """No worker holds some shards of a fully sharded state any more. Ends the job where no checkpoint has them either.
    ``lost``: each such shard of the
    newest commit, of how many, and the hosts that had it.
    """

    def __init__(self, lost: Sequence[tuple[int, int, Sequence[str]]]) -> None:
        self.lost = [(shard, shards, tuple(hosts)) for shard, shards, hosts in lost]
        said = "; ".join(
            f"shard {shard} of {shards} was on {', '.join(dict.fromkeys(hosts)) or 'its own worker only'}"
            for shard, shards, hosts in self.lost
        )
        super().__init__(
            f"the state is fully sharded, and no worker holds all of it any more: {said or 'no commit was made'}; raise"
            " copies of elastic.TorchState, so that more workers can be lost at once"
        )

    def __reduce__(self) -> tuple[type[ShardLost], tuple[list[tuple[int, int, tuple[str, ...]]]]]:
        return type(self), (self.lost,)


class JobFailed(ElasticError, RuntimeError):
    """A launched job ended without success; the message names rank, host and exit code.

    A RuntimeError too, which is what callers of ``horovod.run`` catch.
    """


class ScriptMistakes(ElasticError):
    """With ``--strict``: the first steps of the script showed what a failure would make wrong. Ends the job with exit
    code 2.
    """


class RequestRefused(ElasticError):
    """A running job does not do what it was asked for; the message says why."""


class JobOver(JobFailed):
    """As JobFailed, in a worker: the driver has said why, once for all, so it ends a worker without a traceback."""


class DeviceLost(ElasticError):
    """A GPU does not answer, or has reported an error that its process can't survive: the process has to end."""


class DriverLost(ElasticError):
    """The connection to the driver broke, and without it this worker can't go on."""


class Differing(NamedTuple):
    """A group whose ranks have called different collectives. ``key`` names it to all of them, in their world."""

    key: str
    rank: int
    size: int


class CollectiveFailed(HorovodInternalError):
    """A collective of one group broke or was aborted. The runtime turns it into ``PeerLost`` where a job can recover.

    In a world of a fixed size it reaches the script: nobody replaces the lost worker there. ``aborted``: the group was
    aborted, here or by another rank, so that the error does not know why. ``ended``: the rank whose process has ended,
    where that is seen. ``differs``: of ranks that have called different collectives, the group. ``late``: a rank did
    not come in time. ``rank``: the one that left, ended, differed or was late, by its rank in the group, where one
    is known. ``awaited``: the key under which ranks were awaited at the store.
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
        """The same once more: each one that waits raises its own."""
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
    """What the ranks submitted under one name does not fit together; every rank raises it, and names the difference.

    A Horovod error by name, and yet never recovered: the same lines would submit the same tensors again. It ends the
    worker with its traceback. ``calls``: the ranks' different calls, as `elastic.protocol.calls.Called`.
    """

    calls: tuple[Any, ...] = ()

    def __init__(self, *args: object, calls: Sequence[Any] = ()) -> None:
        super().__init__(*args)
        self.calls = tuple(calls)

    def again(self) -> TensorMismatch:
        """The same once more: each one that waits raises its own."""
        return TensorMismatch(*self.args, calls=self.calls)


class Invalid(ElasticError, ValueError):
    """Bad input: a flag, a file, an argument. The message says what to do."""


class Unsupported(Invalid, HorovodInternalError, NotImplementedError):
    """A collective can't do what it is asked for, such as a reducescatter of maxima. Raised before anything is sent.

    Horovod raises some of these as a HorovodInternalError or a NotImplementedError. Here it is never recovered: the
    same lines would ask for the same again.
    """


class Fixed(enum.Enum):
    """What keeps its layout for one world, and so can't follow an elastic job's; see `NotElastic`."""

    PROCESS_GROUP = "process group of some ranks"
    PARAMETERS = "sharded parameters"
    MODULE = "fully sharded module"
    OPTIMIZER = "sharded optimizer"


class NotElastic(Invalid, NotImplementedError):
    """A script has something that can't follow a change of the world. ``kind``: what that is.

    Raised before it trains, or before the next update after a change. It ends the worker: the same script would have
    the same again.
    """

    def __init__(self, message: str, kind: Fixed) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[NotElastic], tuple[str, Fixed]]:
        return type(self), (str(self), self.kind)


class NotReduced(Invalid):
    """A model in DistributedDataParallel trains a parameter that this was not built with: ranks would differ in it.

    ``parameter``: its name, as in ``model.layer.weight``.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[type[NotReduced], tuple[str, str]]:
        return type(self), (str(self), self.parameter)


class DuplicateName(Invalid):
    """A collective was submitted under a name that one in flight has."""


class UnsupportedType(Invalid, TypeError):
    """A collective can't carry tensors of this dtype; a ValueError in Horovod."""


class NotPicklable(Invalid, TypeError):
    """An object belongs to its process, such as a state, and was to be pickled or copied."""


class StaleValueWarning(UserWarning):
    """Something of the script was made for a world that has changed, and does not follow: a schedule of the learning
    rate, a variable of the environment. The message says what to do.
    """


def summary_of(error: BaseException) -> str:
    """``OSError: the first line of its message``, up to `SUMMARY_LIMIT` characters; the class alone where that is
    empty. Notes are left out.
    """
    try:
        text = str(error)
    except Exception as failure:  # its __str__ raised, and the class is what is known
        text = f"its __str__ raised {type(failure).__name__}"
    lines = filter(None, map(str.strip, text.splitlines()))
    return shortened(": ".join([type(error).__name__, *itertools.islice(lines, 1)]))


def shortened(line: str) -> str:
    """Without what of its middle is too much for a line of a log."""
    if len(line) <= SUMMARY_LIMIT:
        return line
    half = SUMMARY_LIMIT // 2
    return f"{line[:half]} ... {len(line) - 2 * half} characters ... {line[-half:]}"
