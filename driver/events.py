"""Events that `Membership` receives (past tense) and actions that it requests (imperative). Pure: values only.

Events and actions are msgspec structs, which the journal stores as JSON objects.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated

import msgspec

from elastic.driver.reasons import Reason
from elastic.protocol.calls import Called
from elastic.protocol.messages import (
    PHASES_LIMIT,
    Address,
    Commit,
    Finite,
    Launches,
    OlderCommits,
    Part,
    Place,
    RowBytes,
    ShardsHeld,
    ShardsPlaced,
    Times,
    Value,
    Worker,
)


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base class of all events, which are occurrences outside of membership."""


class HostsChanged(Event):
    """Event: discovery returned a new list of hosts, with the slots of each, in order of preference.

    Args:
        fixed: whether discovery will never list additional hosts or slots. An operator can still add slots to this
            machine.
    """

    hosts: dict[str, int]
    fixed: bool = False


class HostsQueued(Event):
    """Event: the number of requested hosts waiting for admission by the cluster's queue has changed.

    Args:
        hosts: number of hosts that wait for admission. While it is nonzero, the job waits for workers without a
            deadline, because the queue determines when hosts start.
    """

    hosts: int


class WorkerConnected(Event):
    """Event: a worker process called ``init()``."""

    worker: Worker
    pid: int
    torch_version: str = ""


class WorkerReconnected(Event):
    """Event: a worker replaced a lost connection. See `protocol.messages.Reconnected`."""

    worker: Worker
    generation: int
    welcomed: bool


class WorkerReady(Event, omit_defaults=True):
    """Event: a worker waits for a world. See `protocol.messages.Ready`.

    The journal omits defaults of this event and of `WorkerResumed`, because all workers report them at each loss.
    """

    worker: Worker
    generation: int
    commit: Commit | None
    store: Address
    layout: str = ""
    running: bool = True
    number: int = 0
    shards: ShardsHeld | None = None
    kept: OlderCommits = OlderCommits()
    step: int | None = None
    own_pace: bool = False
    metadata: dict[str, str] = {}
    source: dict[str, str] = {}


class WorkersReady(Event, omit_defaults=True):
    """Event: several workers of one host wait for a world, and their `WorkerReady` differ only in worker and port.

    The host's agent merges the reports, see `agents.merged_reports`. Workers with a sharded state or with metadata
    report separately.

    Args:
        address: address of the stores of all these workers.
        ports: port of the store of each worker.
    """

    workers: list[Worker]
    ports: list[int]
    generation: int
    commit: Commit | None
    address: str
    layout: str = ""
    running: bool = True
    number: int = 0
    kept: OlderCommits = OlderCommits()
    step: int | None = None
    own_pace: bool = False

    def each(self) -> Iterator[WorkerReady]:
        """Yield the report of each worker."""
        for worker, port in zip(self.workers, self.ports, strict=True):
            yield WorkerReady(
                worker,
                self.generation,
                self.commit,
                Address(self.address, port),
                self.layout,
                self.running,
                self.number,
                None,
                self.kept,
                self.step,
                self.own_pace,
            )


class WorkerFailed(Event):
    """Event: a collective failed on a worker.

    Args:
        differs: whether the cause is that ranks called different collectives, which ``calls`` lists.
    """

    worker: Worker
    generation: int
    reason: str
    differs: bool = False
    calls: tuple[Called, ...] = ()


class WorkerStranded(Event):
    """Event: a collective failed on a worker that cannot recover, because it is outside ``elastic.run``.

    For ``differs`` and ``calls`` see `WorkerFailed`.
    """

    worker: Worker
    generation: int
    reason: str
    differs: bool = False
    calls: tuple[Called, ...] = ()


class WorkerChecked(Event):
    """Event: a worker answered the driver's `PrepareChange`. See `protocol.messages.Checked`."""

    worker: Worker
    generation: int
    change: int
    check: int
    group: str = ""


class WorkerLeaving(Event):
    """Event: a worker received SIGTERM and will leave at its next commit."""

    worker: Worker
    reason: str


class WorkerResumed(Event, omit_defaults=True):
    """Event: a worker completed its first collective of a generation.

    Args:
        from_checkpoint: see `protocol.messages.Resumed`.
    """

    worker: Worker
    generation: int
    phases_ms: dict[str, float]
    copied_bytes: int = 0
    from_checkpoint: bool = False
    shards: ShardsPlaced | None = None


class WorkersResumed(Event, omit_defaults=True):
    """Event: several workers of one host completed their first collective of a generation.

    The host's agent merges the reports, see `agents.merged_reports`. Workers with a sharded state report separately.

    Args:
        phases_ms: milliseconds of each phase for each worker, in the order of ``workers``.
        copied_bytes: see `WorkerResumed`. An empty list means 0 for all workers.
    """

    workers: list[Worker]
    generation: int
    phases_ms: Annotated[dict[str, list[Finite]], msgspec.Meta(max_length=PHASES_LIMIT)]
    copied_bytes: list[int] = []
    from_checkpoint: bool = False

    def each(self) -> Iterator[WorkerResumed]:
        """Yield the report of each worker."""
        copied = self.copied_bytes or [0] * len(self.workers)
        for index, worker in enumerate(self.workers):
            yield WorkerResumed(
                worker,
                self.generation,
                {phase: times[index] for phase, times in self.phases_ms.items()},
                copied[index],
                self.from_checkpoint,
            )


class WorkerDigested(Event):
    """Event: a worker reported the digest of its parameters at a commit."""

    worker: Worker
    generation: int
    commit: Commit
    digest: int
    buffers: int = 0
    samples: list[int] = []
    epoch: int = 0
    step: int = -1
    tensors: dict[str, int] = {}
    gradients: dict[str, int] = {}


class WorkerMiscomputed(Event):
    """Event: a worker reported the result of a vote: ``rank`` computed wrong gradients of a shard.

    See `protocol.messages.Miscomputed`.
    """

    worker: Worker
    generation: int
    step: int
    shard: int
    rank: int
    digest: str
    right: str
    witnesses: list[int]
    agreed: int = -1
    complete: bool = False


class WorkerFoundMistake(Event):
    """Event: the script checks found a mistake in the script. See `protocol.messages.MistakeFound`."""

    worker: Worker
    kind: str
    text: str


class WorkerMerged(Event):
    """Event: the islands of `elastic.DiLoCo` have merged. See `protocol.messages.Merged`."""

    worker: Worker
    generation: int
    merges: int
    position: int
    islands: int
    absent: list[str]
    waited_s: Finite = 0.0
    names: list[str] = []


class WorkerProgressed(Event):
    """Event: a worker started or stopped waiting in a collective, or entered or left a phase marked as long.

    See `protocol.messages.Progress`.
    """

    worker: Worker
    generation: int
    entered: int
    inside: str = ""
    waited_s: Finite = 0.0
    phase: str = ""
    gpu: list[Launches] = []
    line: str = ""


class WorkerLocated(Event):
    """Event: a worker that delays other workers reported the script line that it is executing.

    See `protocol.messages.Located`.
    """

    worker: Worker
    generation: int
    line: str


class WorkerPaced(Event):
    """Event: a worker reported which fraction of the last seconds it spent inside collectives.

    See `protocol.messages.Pace`.
    """

    worker: Worker
    generation: int
    collectives: int
    waited_s: Finite
    over_s: Finite
    commits: int = 0
    commit: Commit | None = None


class WorkerSpent(Event):
    """Event: a worker reported how it has spent its time since ``init()``. No decision depends on this.

    See `protocol.messages.TimeSpent`.
    """

    worker: Worker
    generation: int
    times: Times
    doing: Part
    commit: Commit | None = None
    step: int | None = None
    steps: int | None = None
    batch: int | None = None
    sealed: Commit | None = None
    every: int = 1


class WorkerFrozen(Event):
    """Event: a worker's liveness timeout expired, because the worker was not observed to be running.

    Args:
        how: the cause, as observed from outside.
    """

    worker: Worker
    how: str


class WorkerThawed(Event):
    """Event: a frozen worker is running again."""

    worker: Worker


class WorkerProbed(Event):
    """Event: a host's kernel reported the counters of a worker's process, as requested by `ProbeWorkers`.

    Args:
        cpu_s: CPU time of the process and its children, in seconds.
        io_bytes: number of bytes read and written, cached or not.
        state: state of the process, one letter as in /proc/PID/stat.
        traced: whether a debugger is attached.
    """

    worker: Worker
    cpu_s: Finite
    io_bytes: int
    state: str
    traced: bool = False


class WorkerRaised(Event):
    """Event: user code raised an exception. The process is about to exit."""

    worker: Worker
    generation: int
    commit: Commit | None
    summary: str
    traceback: str
    hardware: bool = False  # whether the cause is a failure of a GPU or NCCL rather than the script
    final: bool = False  # whether the job must end, because a retry would fail in the same way
    # whether the world began without a commit and has not committed yet
    beginning: bool = False
    code: int = 1  # exit code of the job, if final
    # the ranks' incompatible collective calls, if all ranks have received them
    calls: tuple[Called, ...] = ()
    # whether some shards of the state are lost, so that a retry would fail as well
    shards_lost: bool = False


class WorkerQuit(Event):
    """Event: user code called ``sys.exit`` under ``elastic.run``. The process is about to exit with this code.

    ``call`` is the call as text, for example ``sys.exit(3)``.
    """

    worker: Worker
    generation: int
    code: int
    call: str = ""


class WorkerReturned(Event):
    """Event: the function under ``elastic.run`` returned on a worker."""

    worker: Worker
    generation: int


class WorkerDisconnected(Event):
    """Event: the control connection of a worker closed.

    The exit of the worker usually follows immediately. If it does not, the worker must be fenced.

    Args:
        silent: True if the host stopped acknowledging packets, False if the connection was closed.
    """

    worker: Worker
    silent: bool = False


class ExitCause(enum.Enum):
    """Reason for a worker's exit, as reported by the worker's process."""

    # no reason was reported, as with os._exit, a signal, a wrapper script, or a program not in Python
    UNKNOWN = "unknown"
    EXCEPTION = "exception"  # uncaught exception of the script
    LOST_PEER = "lost peer"  # uncaught exception caused by the loss of another worker
    LOST_DRIVER = "lost driver"


class WorkerExited(Event):
    """Event: a worker's process exited and was reaped.

    Args:
        code: exit code, or the negative signal number, as in subprocess.
        reason: reason why the process could not be started; empty if it was started.
        output: tail of the worker's stderr.
        out_of_memory: whether the kernel killed the worker because memory ran out.
        cause: reason for the exit, as reported by the worker.
    """

    worker: Worker
    code: int
    reason: str = ""
    output: str = ""
    out_of_memory: bool = False
    cause: ExitCause = ExitCause.UNKNOWN


class HealthOutcome(enum.Enum):
    """Outcome of a health check."""

    PASSED = "passed"
    FAILED = "failed"  # the check failed or could not be started
    TIMED_OUT = "timed_out"
    WRONG_RESULT = "wrong_result"  # the built-in check did not compute the expected bits
    # bandwidth far below the other hosts'; decided by the driver, never reported by an agent
    LOW_BANDWIDTH = "low_bandwidth"


class WorkerHealthChecked(Event):
    """Event: the health check that accompanies a worker's start has ended. See `Settings.health_check`.

    Args:
        worker: the worker, which is admitted if the check of its slot passed.
        outcome: result of the check.
        code: exit code of the check, or the negative signal number. None if the check timed out or could not be
            started.
        line: last line of the check's output, possibly truncated.
        took_s: seconds from the start of the check to its result.
    """

    worker: Worker
    outcome: HealthOutcome
    code: int | None = None
    line: str = ""
    took_s: Finite = 0.0


class BandwidthMeasured(Event):
    """Event: an agent measured the bandwidth to another host, as requested by `MeasureBandwidth`.

    Args:
        host: the measured host.
        peer: the host at the other end.
        sent: bytes per second from the host to the peer, or None if the measurement failed.
        received: bytes per second from the peer to the host, or None if the measurement failed.
        trouble: reason for the failure of the measurement; empty on success.
        took_s: seconds from the first connection attempt to the result.
    """

    host: str
    peer: str
    sent: Finite | None = None
    received: Finite | None = None
    trouble: str = ""
    took_s: Finite = 0.0


class HostLost(Event):
    """Event: the liveness timeout of a host's agent expired, so processes on the host cannot be killed or notified."""

    host: str
    reason: str


class Notice(Value):
    """Preemption notice for a machine.

    Args:
        text: the source of the notice and its content.
        within_s: seconds until the machine is reclaimed, or None if unknown.
    """

    text: str
    within_s: Finite | None = None


class HostReported(Event):
    """Event: the agent of a host connected again and reported the workers that run there.

    Args:
        running: workers that run on the host.
        ordered: workers whose start orders the agent had received before. Those not in ``running`` have exited. Orders
            for other workers may still be in transit. None means that every order was received.
        notice: the current preemption notice, or None.
    """

    host: str
    running: list[Worker]
    ordered: list[Worker] | None = None
    notice: Notice | None = None


class HostLeaving(Event):
    """Event: a preemption notice for a host was received.

    Args:
        alone: whether the driver runs on the host as well, and ends with it.
    """

    host: str
    notice: Notice
    alone: bool = False


class HostStaying(Event):
    """Event: a host's preemption notice was withdrawn."""

    host: str


class DriverRestarted(Event):
    """Event: a restarted driver has read the previous events from the journal.

    No worker is connected yet, and the most recent actions may not have been performed.
    """


class StopRequested(Event):
    """Event: a stop was requested by Ctrl-C or SIGTERM at the driver, or by a caller.

    Args:
        code: the requested exit code.
        checkpoint_s: seconds allowed for a last checkpoint, if the job writes checkpoints.
    """

    reason: str
    code: int | None = None
    checkpoint_s: float = 0.0


class ScaleRequested(Event):
    """Event: an operator requests a number of workers. ``request`` identifies the request in its answer."""

    request: int
    workers: int


class DrainRequested(Event):
    """Event: an operator requests to drain a host, or to undo the drain if ``off`` is True."""

    request: int
    host: str
    off: bool = False


class RemoveRequested(Event):
    """Event: an operator requests the removal of a worker from the job."""

    request: int
    worker: Worker


class CheckpointMade(Event):
    """Event: a commit was completely written to durable storage."""

    commit: Commit
    step: int | None = None  # step counter of the state, or None if the state has none


class WorkerDiffers(Event):
    """Event: the ``parts`` of a worker's commit differ from those of ``equal`` other workers.

    All replicas were equal before, so the memory of this worker must be damaged.
    """

    worker: Worker
    generation: int
    commit: Commit
    parts: list[str]
    equal: int


class ReplicasSpoilt(Event):
    """Event: infinite or NaN gradients corrupted all replicas because the memory of one worker was damaged.

    The commit ``commit`` and all other commits in memory are lost.

    Args:
        damaged: workers whose parameters differed from those of ``equal`` other workers before. Journals of older
            versions report these workers in an earlier WorkerDiffers event.
    """

    generation: int
    commit: Commit
    damaged: list[Worker] = []
    equal: int = 0


class TimePassed(Event):
    """Event: a deadline returned by ``next_deadline()`` was reached."""


class Action(msgspec.Struct, frozen=True, tag=True):
    """Base class of all actions that membership requests."""


class StartWorker(Action):
    """Start a worker, with a provisional rank."""

    worker: Worker
    place: Place
    reason: Reason


class KillWorker(Action):
    """Kill the whole process group of a worker with SIGKILL. The exit is reported as WorkerExited."""

    worker: Worker
    reason: Reason


class ProbeWorkers(Action):
    """Request the process counters of these workers from their agents. Each answer is a WorkerProbed."""

    workers: list[Worker]


class MeasureBandwidth(Action):
    """Measure the bandwidth between the agents of two hosts. The answer is a BandwidthMeasured."""

    host: str
    peer: str


class TellAwaited(Action):
    """Notify these members which rank they are waiting for, and which script line that rank is executing."""

    generation: int
    members: list[Worker]
    rank: int
    line: str


class DumpStacks(Action):
    """Write the Python stacks of all threads of a worker's process. This works even if the process hangs."""

    worker: Worker
    reason: Reason


class BreakWorld(Action):
    """Notify these members that their generation has ended."""

    generation: int
    members: list[Worker]
    reason: Reason


class Member(msgspec.Struct, frozen=True):
    worker: Worker
    place: Place


class PublishWorld(Action, omit_defaults=True):
    """Publish a new generation. `protocol.messages.World` describes what each member receives.

    Journals of earlier versions lack ``checkpoint``; their replay omits it.
    """

    generation: int
    members: list[Member]  # members in rank order
    store: Address
    holders: int
    commit: Commit | None
    reason: Reason
    checkpoint: bool = False
    metadata: list[dict[str, str]] = []
    source: dict[str, str] = {}


class TellWorld(Action, omit_defaults=True):
    """Send the current world to one member again, because the first message may have been lost with a connection.

    ``copies``, ``metadata`` and ``source`` are those of `protocol.messages.World`.
    """

    generation: int
    member: Member
    store: Address
    holders: int
    commit: Commit | None
    reason: Reason
    checkpoint: bool = False
    copies: list[list[int]] = []
    metadata: list[dict[str, str]] = []
    source: dict[str, str] = {}


class WelcomeWorker(Action):
    worker: Worker
    place: Place
    newcomer: bool
    elastic: bool


class PrepareChange(Action):
    generation: int
    change: int
    members: list[Worker]
    reason: Reason


class StopMembersAt(Action):
    generation: int
    change: int
    check: int
    members: list[Worker]


class CallOffChange(Action):
    generation: int
    change: int
    members: list[Worker]
    reason: Reason


class LetGo(Action):
    """Ask a worker to leave. The worker exits with code 0, or with code 1 if it was ``fenced``."""

    worker: Worker
    reason: Reason
    fenced: bool = False


class RejectWorker(Action):
    """Reject a worker whose layout of the state differs from the world's.

    The event loop compares the texts of the two layouts to log the difference.
    """

    worker: Worker
    layout: str
    expected: str


class TellStandby(Action):
    """Notify a worker that the world has no place for it. The worker waits for a place."""

    worker: Worker


class FinishWorld(Action):
    generation: int
    members: list[Worker]


class GiveUpHost(Action):
    """Treat a host as lost although its agent is connected. If hosts have agents, `HostLost` follows."""

    host: str
    reason: Reason


class HastenCheckpoint(Action):
    """Request a durable commit from rank 0 as soon as possible, because the job may end.

    The request is sent to all members.
    """

    generation: int
    rank0: Worker


class EndJob(Action):
    """End the job. Code 0 is success. On failure, every remaining worker is first notified and then killed."""

    code: int
    reason: Reason


class AnswerRequest(Action):
    """Send an operator the answer to a request: its effect, or the reason for refusing it."""

    request: int
    done: bool
    reason: Reason


class Report(Action):
    """Write a line to the log.

    Args:
        level: info, warning or error.
        about: structured reason for the line, or None.
    """

    level: str
    text: str
    about: Reason | None = None


class ShardsDivided(Value):
    """Division of a sharded state among the workers of a world, and the sources of its rows.

    Args:
        shards: number of shards. With replicas (HSDP), it is smaller than the number of workers.
        copy_hosts: number of additional hosts that hold a copy of each shard.
        restored: the commit that the world restored, as numbered by the sharded state. None means a checkpoint.
        rows: bytes of all workers' rows, by source.
        received: bytes of rows that workers received from other workers.
        lost: shards of the restored commit that were not trained by any worker of this world.
        lost_rows: bytes of rows from these shards.
    """

    shards: int
    copy_hosts: int
    restored: Commit | None
    rows: RowBytes
    received: int
    lost: tuple[int, ...] = ()
    lost_rows: RowBytes = RowBytes()


class ReportRecovery(Action, omit_defaults=True):
    """Report that every member has resumed after a failure or a planned change.

    Times are in milliseconds since the cause was detected. Journals of earlier versions lack the last three fields. The
    replay of such a journal yields the same bytes.

    Args:
        from_checkpoint: whether the survivors restored a durable commit.
        shards: division of a sharded state.
        back_to: next step of the restored older commit, if the newest commit may be wrong. None means the newest
            commit.
    """

    generation: int
    kind: str  # "recovery" or "change"
    reason: Reason
    size: int
    total_ms: float
    phases_ms: dict[str, float]
    copied_bytes: int
    from_checkpoint: bool = False
    shards: ShardsDivided | None = None
    back_to: int | None = None
