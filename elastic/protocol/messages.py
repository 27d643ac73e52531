"""Messages between driver and worker, and the types that both sides share. Pure: bytes in, values out.

A connection opens with a mutual challenge (see `Challenge`), then carries sealed frames (see `framing`). Messages are
tagged by their class name, validated by msgspec when decoded, never pickled. Every message about a world carries its
generation. The messages that a worker receives when the world changes do not grow with the size of the world.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elastic.protocol.calls import Calls

VERSION = 6
# maximum size of a frame in bytes; only a function's return value is this large
FRAME_LIMIT = 64 * 1024 * 1024
RESULT_LIMIT = FRAME_LIMIT - 4096  # maximum size of a function's return value in bytes
RELAY_LIMIT = FRAME_LIMIT + 4096  # limit in bytes for a message of FRAME_LIMIT and its sender
HANDSHAKE_LIMIT = 1024  # maximum number of bytes that a peer may send before it is authenticated
# Small list items take far more memory than bytes on the wire, so the number of items in a frame is limited.
PHASES_LIMIT = 1000
MISTAKE_LIMIT = 2000  # maximum number of characters of the description of a script's mistake
ABSENT_LIMIT = 64  # maximum number of island names in the report of a merge
SAMPLES_LIMIT = 1_000_000
TRACES_LIMIT = 100_000
TENSORS_LIMIT = 100_000
LAUNCHES_LIMIT = 64  # maximum number of groups on one GPU
SHARDS_LIMIT = 100_000  # maximum number of shards of which a worker has a copy
KEPT_LIMIT = 8  # maximum number of older commits of which a worker has a copy
REPORT_LIMIT = 64 * 1024  # maximum size of one report of a script, in bytes
STEP_INPUT_LIMIT = 16 * 1024  # maximum size of a step input, in bytes
COPY = "copy of the state"  # reported while a worker waits for a copy of the state
# reported while a worker waits for a commit of a sharded state
SHARDS_COMMIT = "commit of the shards"
GRADIENTS = "gradients"  # reported while a worker waits for gradients of a DistributedOptimizer
# Offset of the signal above SIGRTMIN. On this signal, a worker writes its stacks.
STACKS_SIGNAL_OFFSET = 4


# NaN and infinity cannot be stored in a journal.
Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


IslandNames = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=300)]], msgspec.Meta(max_length=ABSENT_LIMIT)
]


class ProtocolError(Exception):
    """Error raised when a peer sends an invalid message or fails authentication."""


class Value(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Base class of immutable values inside messages."""


class Worker(Value):
    """Identity of a training process. It is one incarnation of one slot."""

    host: str
    slot: int
    incarnation: int = 1

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}#{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Parse the result of ``str(worker)``. Raises ValueError for any other text."""
        place, _, incarnation = text.rpartition("#")
        host, _, slot = place.rpartition(":")
        if not host:
            raise ValueError(f"{text!r} is not a worker ID: pass host:slot#incarnation")
        return cls(host, int(slot), int(incarnation))

    def next(self) -> Worker:
        return Worker(self.host, self.slot, self.incarnation + 1)


class Commit(Value):
    """Identity of a committed state: the n-th commit of a generation. Newer commits compare greater.

    The text form is ``g2c300``, which cannot be mistaken for a decimal number.
    """

    generation: int
    number: int

    def __str__(self) -> str:
        return f"g{self.generation}c{self.number}"

    @property
    def dotted(self) -> str:
        """Return the commit in the format of journals: ``2.300``."""
        return f"{self.generation}.{self.number}"


def at_step(commit: object, step: int | None) -> str:
    """Describe a commit for the user, by the state's step if it is known."""
    return f"commit {commit}" if step is None else f"step {step} (commit {commit})"


class KeptCommit(Value):
    """Older commit of which a worker has a copy.

    ``step`` is the number of the next step of the worker's `Shards`.
    """

    commit: Commit
    step: int


class OlderCommits(Value):
    """Older commits of which a worker has copies, oldest first."""

    commits: Annotated[tuple[KeptCommit, ...], Meta(max_length=KEPT_LIMIT)] = ()


class Address(Value):
    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port``, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Times(Value):
    """Time in seconds that a worker has spent on each activity. The sum is the worker's age. See
    `elastic.monitoring.time_account`.
    """

    training: Finite = 0.0
    committing: Finite = 0.0
    data: Finite = 0.0
    storage: Finite = 0.0
    recovering: Finite = 0.0
    joining: Finite = 0.0
    lost: Finite = 0.0
    idle: Finite = 0.0


Part = Literal["training", "committing", "data", "storage", "recovering", "joining", "lost", "idle"]


class Place(Value):
    """Place of one worker in a world: its global, local and cross rank, with the corresponding sizes."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Launches(Value):
    """Progress of a worker's GPU in the collectives of one group, which all its ranks launch in the same order."""

    group: str  # ID of the group, the same on all its ranks
    size: int  # number of ranks of the group
    launched: int
    arrived: int  # number of collectives that the GPU has started
    done: int  # number of collectives that have ended
    took_s: Finite = 0.0  # longest time from a launch to its start on the GPU, in seconds
    failed: bool = False  # whether CUDA reports an error


class HeldCommitShards(Value):
    """Complete shards of one in-memory commit that a worker can read, including copies of other workers' shards.

    ``commit`` is a number of the sharded state, which counts its saves in a world from 0.
    """

    commit: Commit
    shards: int  # number of shards of the commit
    own: int | None  # shard of this worker, or None if the worker has only copies
    # other shards of which the worker has copies
    copies: Annotated[tuple[int, ...], Meta(max_length=SHARDS_LIMIT)] = ()
    mirrored: bool = True  # whether the worker also has all required copies


class ShardsHeld(Value):
    """Report of the shards that a worker can contribute to the next world.

    Args:
        copies: number of copies of each shard, as given to the state.
        sealed: the newest commit that, as far as this worker knows, all ranks have copied and mirrored.
    """

    copies: int
    sealed: Commit | None = None
    # complete shards in each of the two snapshot buffers
    held: Annotated[tuple[HeldCommitShards, ...], Meta(max_length=2)] = ()


class RowBytes(Value):
    """Sizes in bytes of the rows of a new shard, by source.

    Args:
        memory: bytes from this worker's memory, including copies that it kept.
        host: bytes from another worker of its host, even one that has exited.
        network: bytes from a worker of another host.
        checkpoint: bytes from storage.
    """

    memory: int = 0
    host: int = 0
    network: int = 0
    checkpoint: int = 0


def total_rows(parts: Iterable[RowBytes]) -> RowBytes:
    """Return the sum of the bytes of several workers."""
    return RowBytes(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


class ShardsPlaced(Value):
    """A worker's part of a sharded state in a world, and the sources of its rows."""

    shards: int  # number of shards of the world
    shard: int  # shard of this worker
    # other shards of which this worker keeps copies
    keeps: Annotated[tuple[int, ...], Meta(max_length=SHARDS_LIMIT)] = ()
    # whether other workers of the host map the memory, so that it survives the worker
    lasting: bool = False
    # The restored commit, as in `HeldCommitShards.commit`; None means a checkpoint.
    restored: Commit | None = None
    rows: RowBytes = RowBytes()  # bytes of all rows of this worker, by source
    received: int = 0  # bytes of these rows that other workers sent
    # shards of the restored commit that no worker of this world had trained, and this worker's rows from them
    lost: Annotated[tuple[int, ...], Meta(max_length=SHARDS_LIMIT)] = ()
    lost_rows: RowBytes = RowBytes()


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base class of all messages on a control connection."""


# ---- the handshake -------------------------------------------------------------------------------


class Challenge(Message):
    """First frame of the driver. It requests proof that the peer has the job's secret."""

    nonce: bytes
    version: int = VERSION


class Answer(Message):
    """Answer of a worker to the challenge: its proof, and its own challenge."""

    worker: Worker
    nonce: bytes
    proof: bytes
    version: int = VERSION


class Accepted(Message):
    """Answer of the driver: its proof that it also has the secret."""

    proof: bytes


class TurnedAway(Message):
    """Refusal of an authenticated peer, sent instead of Accepted. ``proof`` is the driver's proof over this reason."""

    reason: str
    proof: bytes


# ---- worker -> driver ----------------------------------------------------------------------------


class Hello(Message):
    """First message after the handshake. ``torch_version`` is empty if unknown."""

    worker: Worker
    pid: int
    torch_version: str = ""


class Reconnected(Message):
    """First message on a connection that replaces a lost connection. Unanswered messages follow again.

    Args:
        generation: generation of the last world that the worker received.
        welcomed: whether the driver has answered Hello.
    """

    generation: int
    welcomed: bool


class Layout(Message):
    """Names, shapes and dtypes of this worker's state, sent once, before the first Ready that contains their digest."""

    digest: str
    text: str


class StepInput(Message):
    """Format of this worker's batches, as described by its framework. Joining workers use it. See `Welcome`."""

    kind: Annotated[bytes, Meta(max_length=STEP_INPUT_LIMIT)]


class Ready(Message):
    """Message: this worker waits for a world. ``generation`` is the worker's last generation, or 0 if it had none."""

    generation: int
    commit: Commit | None
    # address at which this worker would serve the generation's store as rank 0; already bound
    store: Address
    layout: str = ""  # digest of the state's layout, empty before elastic.run
    running: bool = True  # whether the worker is in elastic.run; False in init()
    # Number of times that this process has waited. A delayed Ready with a smaller number is ignored.
    number: int = 0
    shards: ShardsHeld | None = None  # shards that the worker holds, if its state is sharded
    kept: OlderCommits = OlderCommits()
    step: int | None = None  # step counter of the state at the commit, or None
    # whether this worker stops for a planned change at its next safepoint, see `Recovery.own_pace`
    own_pace: bool = False


class Failed(Message):
    """Report that a collective of this generation failed on this worker.

    Args:
        differs: whether the ranks made the different calls that ``calls`` lists.
    """

    generation: int
    reason: str
    differs: bool = False
    calls: Calls = ()


class Stranded(Message):
    """Message: a collective failed outside ``elastic.run``, so this process cannot recover. For the fields, see
    `Failed`.
    """

    generation: int
    reason: str
    differs: bool = False
    calls: Calls = ()


class Checked(Message):
    """Answer to Prepare with the number of safepoints passed. The worker stops at the next safepoint."""

    generation: int
    change: int
    check: int


class Leaving(Message):
    """Notice that this worker received SIGTERM and leaves at its next commit."""

    reason: str


class Resumed(Message):
    """Report that the first collective of a generation completed on this worker.

    Args:
        phases_ms: milliseconds of each phase of the recovery, in order.
        from_checkpoint: whether the world began from a durable commit, because no complete commit was left in memory.
        shards: this worker's part of a sharded state, or None.
    """

    generation: int
    phases_ms: Annotated[dict[str, Finite], Meta(max_length=PHASES_LIMIT)]
    copied_bytes: int = 0
    from_checkpoint: bool = False
    shards: ShardsPlaced | None = None


class Progress(Message):
    """Activity of the training thread: whether it waits in a collective, or is in a long phase.

    Sent when it has waited in one collective for a while, when that wait ends, and at both ends of a phase that the
    user marks as long. Steps without a long wait send nothing.
    """

    generation: int
    entered: int  # number of collectives entered in this generation
    inside: str = ""  # name of the collective in which the worker waits, or empty
    waited_s: Finite = 0.0  # seconds that the worker has been in the collective
    phase: str = ""  # name of the current long phase of the worker, or empty
    # progress of the worker's GPU while it waits
    gpu: Annotated[list[Launches], Meta(max_length=LAUNCHES_LIMIT)] = []
    line: str = ""  # script line at which the worker waits, or empty if unknown


class Located(Message):
    """Answer to `Locate`: the line of the script that this worker executes."""

    generation: int
    line: str  # script line, or empty if unknown


class Pace(Message):
    """Statistics of collectives since the previous Pace.

    A worker that waits much less than its peers is a straggler.
    """

    generation: int
    collectives: int  # number of completed collectives
    waited_s: Finite  # seconds that the training thread spent in collectives
    over_s: Finite  # seconds that the report covers
    commits: int = 0  # number of commits in these seconds
    commit: Commit | None = None  # the newest commit that all members have agreed on


class TimeSpent(Message):
    """Report of the time that this worker has spent on each activity since ``init()``.

    Sent periodically, when training begins in a world, and at exit.
    """

    generation: int
    times: Times
    doing: Part  # current activity of the worker
    commit: Commit | None = None  # the newest commit that all members have agreed on
    step: int | None = None  # step counter of the state at the newest commit, or None
    # number of optimizer steps since training began; None means that no step was seen
    steps: int | None = None
    batch: int | None = None  # number of samples of such a step on this worker, or None if unknown
    sealed: Commit | None = None  # newest sealed commit of a sharded state; see `ShardsHeld`
    every: int = 1  # number of calls of commit() per copy of the state; see --commit-budget


class Digested(Message):
    """Digest of the parameters of a commit. In tests, it also contains the samples trained since the last commit.

    Args:
        step: the step after the commit if the state has shards, else -1.
        tensors: digest of each tensor of the state by name, if requested.
        gradients: if requested, digests of the last step's gradients before any sum, by shard and parameter, as ``3
            layer.weight``. Only shards that this worker computed are included.
    """

    generation: int
    commit: Commit
    digest: int
    buffers: int = 0
    samples: Annotated[list[int], Meta(max_length=SAMPLES_LIMIT)] = []
    epoch: int = 0
    step: int = -1
    tensors: Annotated[dict[str, int], Meta(max_length=TENSORS_LIMIT)] = {}
    gradients: Annotated[dict[str, int], Meta(max_length=TENSORS_LIMIT)] = {}


class Miscomputed(Message):
    """Message: in a vote of the ranks, one rank computed wrong gradients of a shard. See `elastic.exact.verifier`.

    Sent by every rank. Digests are 16 hexadecimal digits, or ``not finite`` or ``too large``.
    """

    generation: int
    step: int
    shard: int
    rank: int  # rank that computed the wrong gradients
    digest: Annotated[str, Meta(max_length=16)]  # digest of the wrong gradients
    right: Annotated[str, Meta(max_length=16)]
    witnesses: Annotated[list[int], Meta(max_length=16)]  # ranks that computed the right gradients
    # last step of this world in which that rank's gradients were compared and right; -1 means none
    agreed: int = -1
    # whether all gradients are compared before they are used, so that no commit can contain wrong ones
    complete: bool = False


class MistakeFound(Message):
    """Message of rank 0: a mistake in the script, found by its checks. See `elastic.script_checks.mistakes`.

    Args:
        kind: kind of the mistake, as in docs/script-checks.md.
        text: the mistake, its consequence and the remedy, in one line.
    """

    kind: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=MISTAKE_LIMIT)]


class Merged(Message):
    """Message of rank 0: a merge of `elastic.DiLoCo`. Sent at most once a second, or if the absent islands change.

    Args:
        merges: number of merges of the job.
        position: number of inner steps of the job.
        islands: number of islands in the world.
        absent: names of the islands that the merge did not wait for, at most `ABSENT_LIMIT`.
        waited_s: seconds that this rank has waited for merges in inner steps since its previous message.
        names: names of the islands in the world, at most `ABSENT_LIMIT`. Empty if this rank has sent the same names in
            this generation, less than a minute ago.
    """

    generation: int
    merges: Annotated[int, Meta(ge=0)]
    position: Annotated[int, Meta(ge=0)]
    islands: Annotated[int, Meta(ge=1)]
    absent: IslandNames
    waited_s: Finite = 0.0
    names: IslandNames = []


class Raised(Message):
    """Report that user code raised an exception, and that the process is about to exit with this traceback."""

    generation: int
    commit: Commit | None
    summary: str
    traceback: str
    # Whether a GPU or NCCL has failed. See `elastic.runtime.failures.hardware_errors`.
    hardware: bool = False
    final: bool = False  # whether a retry would fail in the same way
    # whether training has not begun: no worker of the world had a commit, and the world has made none
    beginning: bool = False
    code: Annotated[int, Meta(ge=1, le=255)] = 1  # exit code of the job, if final
    calls: Calls = ()  # mismatched calls, which all ranks received
    # whether shards of the state were lost, so that the failure is final
    shards_lost: bool = False


class Quit(Message):
    """Notice that the process is about to exit with this code (0 to 255).

    Sent if user code called ``sys.exit`` under ``elastic.run``, or if the worker's state does not match.

    Args:
        call: text of the call, such as ``sys.exit(3)``. Empty if user code made no call.
    """

    generation: int
    code: int
    call: str = ""


class Returned(Message):
    """Report that the function under ``elastic.run`` has returned."""

    generation: int


class SendResult(Message, tag="Result"):
    """Message: the return value of a launched function, which the driver does not decode."""

    blob: bytes


class Reported(Message):
    """Message: metrics that the script reports to the program that started the job.

    Reports are delivered exactly once, in the order of their numbers. See `report_queue`.
    """

    number: int  # number of the report among this process's reports, from 1
    # first report that may not have been delivered; this driver or a predecessor has received all earlier ones
    oldest: int
    generation: int  # generation at the time of the report, like rank and size
    rank: int
    size: int
    at: Finite  # time of the report in seconds since 1970
    # encoded metrics, which agents do not decode
    metrics: Annotated[bytes, Meta(max_length=REPORT_LIMIT)]
    dropped: int = 0  # number of reports dropped since the previous one, because the queue was full


Trace = tuple[
    str, str, str, int, int
]  # kind, row, name, start (ns) and duration (ns) of each record; see trace_buffer


class ClockAsked(Message):
    """Request for the driver's clock. ``asked_ns`` is on this worker's monotonic clock."""

    asked_ns: int


class Traced(Message):
    """Timeline records of this worker. ``offset_ns`` converts its times to the driver's clock."""

    timeline: int
    offset_ns: int
    records: Annotated[list[Trace], Meta(max_length=TRACES_LIMIT)]
    # number of records dropped since the last message, because the buffer was full
    dropped: int = 0


class TracedAll(Message):
    """Notice that this worker has sent all its records of a timeline that has ended."""

    timeline: int


class TimelineWanted(Message):
    """Request of the script for a timeline in this file, an absolute path on the driver's host."""

    request: int
    path: str
    mark_cycles: bool


class TimelineUnwanted(Message):
    """Request of the script to end this timeline. The answer is sent when its file is complete."""

    request: int
    timeline: int


class CheckpointDue(Message):
    """Request of rank 0 to make a commit durable on all ranks: the first commit of this generation from
    ``number`` on.
    """

    generation: int
    number: int


class NotFinite(Message):
    """Report that gradients have been infinite or NaN since before this commit.

    Sent at the first such commit of a world, and again while the condition lasts.

    Args:
        digest: digest of this rank's parameters before the first such step, or None if this rank did not take part in
            that step.
    """

    generation: int
    commit: Commit
    digest: int | None


class ShareWritten(Message):
    """Report that this rank's part of checkpoint ``number`` is in the storage."""

    generation: int
    number: int
    commit: Commit
    digests: dict[str, int]


class ShareDropped(Message):
    """Notice that this rank cannot write its part of a checkpoint. The driver then cancels the checkpoint."""

    generation: int
    number: int
    reason: str
    timing: bool = False


class CheckpointWritten(Message):
    """Message: the checkpoint is complete in storage and was verified by reading it.

    Args:
        commit: the commit that it contains.
    """

    generation: int
    number: int
    commit: Commit
    place: str  # folder of the commit
    size: int  # size in bytes
    took_s: Finite
    step: int | None = None  # step counter of the state, or None


# ---- driver -> worker ----------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello, with a provisional place.

    Args:
        newcomer: if a world is already training, the format of its batches as in the last `StepInput`, possibly empty.
            Otherwise None.
    """

    place: Place
    newcomer: bool
    elastic: bool
    step_input: Annotated[bytes, Meta(max_length=STEP_INPUT_LIMIT)] = b""


class World(Message):
    """Message: a new world has formed. Contains the receiver's place in it.

    Ranks ``0 .. holders-1`` hold ``commit``, the newest commit. The other ranks receive it from rank 0. If no worker
    has committed, ``holders`` is 0 and ``commit`` is None, and rank 0 is the source of the state.

    Args:
        run: ID under which this world's checkpoints are written, 0 without checkpoints. After a failover, the new
            driver uses another ID, and all workers must use the same one.
        checkpoint: whether the initial commit is made durable before training starts.
    """

    generation: int
    place: Place
    store: Address
    holders: int
    commit: Commit | None
    reason: str
    run: int = 0
    checkpoint: bool = False


class Broken(Message):
    """Message: this generation has ended.

    The receiver closes its sockets, restores the last commit, and reports ready.
    """

    generation: int
    reason: str


class Prepare(Message):
    """Start of a planned change.

    The receiver answers with the number of safepoints passed, and waits at the next one.
    """

    generation: int
    change: int


class StopAt(Message):
    """Order to stop at this safepoint, sent to all workers."""

    generation: int
    change: int
    check: int


class Proceed(Message):
    """Notice that the planned change is cancelled, and that the receiver continues."""

    generation: int
    change: int


class Leave(Message):
    """Order to leave the job and to exit with code 0, or with code 1 if ``fenced``.

    Args:
        fenced: whether the driver has fenced the worker, so that its later work is discarded.
    """

    reason: str
    fenced: bool = False


class Restate(Message):
    """Request to report the current status again (see `Reconnected`), because messages may have been lost.

    Sent by the agent after it reconnects.
    """


class Locate(Message):
    """Request for the current line of the script, because other ranks wait for the receiver."""


class Awaited(Message):
    """Notice that the receiver waits for this rank, which executes this line of the script."""

    generation: int
    rank: int
    line: str


class Rejected(Message):
    """Notice that the receiver's state does not match that of the world. The reason names the difference."""

    reason: str


class StandBy(Message):
    """Order: the world has its maximum size, so the receiver waits as a standby, without a timeout."""


class Finish(Message):
    """Message: the training function has returned on every worker of the world."""

    generation: int


class End(Message):
    """Notice that the job has failed. The receiver aborts blocking calls and exits."""

    reason: str


class ClockTold(Message):
    """Answer to ClockAsked: the times at which it was received and answered, on the driver's monotonic clock."""

    asked_ns: int
    heard_ns: int
    told_ns: int


class ReportsTaken(Message):
    """Acknowledgement that all reports up to this number are delivered and need not be kept for another driver."""

    number: int


class Tracing(Message):
    """Order: start recording this timeline or, if ``on`` is False, stop and send the remaining records."""

    timeline: int
    on: bool
    mark_cycles: bool = False


class HostsListed(Message):
    """Notice that the list of hosts has changed.

    Listeners of the script receive it. Changes of the world are announced by Prepare.
    """


class TracesTaken(Message):
    """Message: one `Traced` was written to the file, so the worker may send another one."""

    timeline: int


class TimelineAnswer(Message):
    """Answer to a timeline request. ``error`` is empty on success. The other fields describe the current timeline."""

    request: int
    timeline: int
    path: str = ""
    error: str = ""


class MakeDurable(Message):
    """Order to write the first commit of this generation from ``number`` on to the storage."""

    generation: int
    number: int


class CheckpointSoon(Message):
    """Request for a last checkpoint, because the job stops or its machines are preempted. Rank 0 starts it."""

    generation: int


class SealCheckpoint(Message):
    """Order to rank 0 to write the manifest, which completes the checkpoint, because all parts are written."""

    generation: int
    number: int


class DropCheckpoint(Message):
    """Order to stop writing the checkpoint, because it is cancelled.

    Args:
        again: whether the checkpoint is retried, because the request reached a rank too late.
    """

    generation: int
    number: int
    again: bool = False


class CheckpointDone(Message):
    """Notice that the checkpoint is complete and contains this commit."""

    generation: int
    number: int
    commit: Commit


FromWorker = (
    Answer
    | Hello
    | Reconnected
    | Layout
    | StepInput
    | Ready
    | Failed
    | Stranded
    | Checked
    | Leaving
    | Resumed
    | Progress
    | Located
    | Pace
    | TimeSpent
    | Digested
    | Miscomputed
    | MistakeFound
    | Merged
    | Raised
    | Quit
    | Returned
    | SendResult
    | Reported
    | ClockAsked
    | Traced
    | TracedAll
    | TimelineWanted
    | TimelineUnwanted
    | CheckpointDue
    | NotFinite
    | ShareWritten
    | ShareDropped
    | CheckpointWritten
)
FromDriver = (
    Challenge
    | Accepted
    | TurnedAway
    | Welcome
    | World
    | Broken
    | Prepare
    | StopAt
    | Proceed
    | Leave
    | Restate
    | Locate
    | Awaited
    | Rejected
    | Finish
    | End
    | ClockTold
    | ReportsTaken
    | HostsListed
    | Tracing
    | TracesTaken
    | TimelineAnswer
    | MakeDurable
    | CheckpointSoon
    | StandBy
    | SealCheckpoint
    | DropCheckpoint
    | CheckpointDone
)

_encoder = msgspec.msgpack.Encoder()
from_worker: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromWorker)
from_driver: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromDriver)


def encoded(message: msgspec.Struct, limit: int = FRAME_LIMIT) -> bytes:
    """Encode the body of a frame. Raises ProtocolError if it exceeds ``limit`` bytes."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:  # An error message may contain a file name that is not valid UTF-8.
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        body = _encoder.encode(_sayable(plain))
    if len(body) > limit:
        raise ProtocolError(
            f"{type(message).__name__} has {len(body)} bytes, but the limit is {limit}"
        )
    return body


def _sayable(tree: Any) -> Any:
    match tree:
        case str():
            return tree.encode(errors="replace").decode()
        case list() | tuple():
            return [_sayable(each) for each in tree]
        case dict():
            return {_sayable(key): _sayable(value) for key, value in tree.items()}
    return tree
