"""Messages between driver and worker, and the types that both sides share. Pure: bytes in, values out.

A connection opens with a mutual challenge (see `Challenge`), then carries sealed frames (see `framing`). Messages are
tagged by their class name, validated by msgspec when decoded, and never pickled. Every message about a world carries
its generation. The messages that a worker receives when the world changes do not grow with the size of the world,
except for `World.metadata` in worlds of at most `MEMBERS_WITH_METADATA` workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elastic.protocol.calls import Calls

VERSION = 8
# maximum size of a frame in bytes; only the return value of a function needs a frame this large
FRAME_LIMIT = 64 * 1024 * 1024
RESULT_LIMIT = FRAME_LIMIT - 4096  # maximum size of a function's return value in bytes
# maximum size in bytes of a relayed message: one of FRAME_LIMIT, with the name of its sender
RELAY_LIMIT = FRAME_LIMIT + 4096
HANDSHAKE_LIMIT = 1024  # maximum number of bytes that a peer may send before it is authenticated
# Small list items take much more memory when decoded than on the wire, so the number of items in a frame is limited.
PHASES_LIMIT = 1000
MISTAKE_LIMIT = 2000  # maximum number of characters in the description of a script's mistake
ABSENT_LIMIT = 64  # maximum number of island names in the report of a merge
SAMPLES_LIMIT = 1_000_000
TRACES_LIMIT = 100_000
TENSORS_LIMIT = 100_000
LAUNCHES_LIMIT = 64  # maximum number of groups on one GPU that a worker reports
SHARDS_LIMIT = 100_000  # maximum number of shards that a worker holds copies of
KEPT_LIMIT = 8  # maximum number of older commits that a worker holds copies of
REPORT_LIMIT = 64 * 1024  # maximum size of one report of a script, in bytes
STEP_INPUT_LIMIT = 16 * 1024  # maximum size of a step input, in bytes
METADATA_LIMIT = 4096  # maximum size of one value of a worker's metadata, in characters
METADATA_VALUES = 16  # maximum number of values in a worker's metadata
MEMBERS_WITH_METADATA = 128  # maximum size of a world whose members receive each other's metadata
SOURCE_LIMIT = 16 * 1024  # maximum size of one value of `Ready.source`, in characters
MEMBERS_WITH_SOURCE = 32  # maximum size of a world whose members send `Ready.source`
COPY = "copy of the state"  # activity that a worker reports while it waits for a copy of the state
# activity that a worker reports while it waits for a commit of a sharded state
SHARDS_COMMIT = "commit of the shards"
# activity that a worker reports while it waits for gradients of a DistributedOptimizer
GRADIENTS = "gradients"
STATE = "state"  # purpose of the group in which the state is sent
# Number of the signal on which a worker writes its stacks, counted from SIGRTMIN.
STACKS_SIGNAL_OFFSET = 4


# A journal cannot store NaN or infinity.
Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


# Short values that a worker sends to all members of its next world, by name. The driver does not interpret them.
Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=300)],
        Annotated[str, msgspec.Meta(max_length=METADATA_LIMIT)],
    ],
    msgspec.Meta(max_length=METADATA_VALUES),
]


# First values that a worker broadcasts if it is the source of the state, by the name of the broadcast.
Source = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=300)],
        Annotated[str, msgspec.Meta(max_length=SOURCE_LIMIT)],
    ],
    msgspec.Meta(max_length=METADATA_VALUES),
]


IslandNames = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=300)]], msgspec.Meta(max_length=ABSENT_LIMIT)
]


class ProtocolError(Exception):
    """Error raised when a peer sends an invalid message or fails authentication."""


class Value(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Base class of immutable values that messages contain."""


class Worker(Value, cache_hash=True):
    """Identity of a training process: one incarnation of one slot."""

    host: str
    slot: int
    incarnation: int = 1

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}#{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Parse a worker's text form, as returned by ``str(worker)``. Raises ValueError for any other text."""
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
        """Return the commit in the format of the journal: ``2.300``."""
        return f"{self.generation}.{self.number}"


def at_step(commit: object, step: int | None) -> str:
    """Describe a commit for the user, by the state's step counter if known."""
    return f"commit {commit}" if step is None else f"step {step} (commit {commit})"


class KeptCommit(Value):
    """Older commit that a worker holds a copy of.

    ``step`` is the next step of the worker's `Shards` after the commit.
    """

    commit: Commit
    step: int


class OlderCommits(Value):
    """Older commits that a worker holds copies of, oldest first."""

    commits: Annotated[tuple[KeptCommit, ...], Meta(max_length=KEPT_LIMIT)] = ()


class Address(Value):
    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port``, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Times(Value):
    """Time in seconds that a worker has spent on each activity. The sum is the time since the worker started.

    See `elastic.monitoring.time_account`.
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
    """Position of one worker in a world: global, local and cross rank, with the corresponding sizes."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def several_hosts(self) -> bool:
        """Whether the world spans several hosts. The value is equal on all ranks, unlike ``cross_size``."""
        return self.local_size < self.size


class Launches(Value):
    """Progress of a worker's GPU through the collectives of one group.

    All ranks of the group launch them in the same order.
    """

    group: str  # ID of the group, equal on all its ranks
    size: int  # number of ranks of the group
    launched: int
    arrived: int  # number of collectives that the GPU has started
    done: int  # number of collectives that the GPU has completed
    # longest time in seconds between the launch of a collective and its start on the GPU
    took_s: Finite = 0.0
    failed: bool = False  # whether CUDA reports an error


class HeldCommitShards(Value):
    """Complete shards of one in-memory commit that a worker can read, including copies of other workers' shards.

    ``commit`` is numbered by the sharded state, which counts its saves in each world from 0.
    """

    commit: Commit
    shards: int  # number of shards of the commit
    own: int | None  # this worker's own shard, or None if the worker has only copies
    # other shards that the worker holds copies of
    copies: Annotated[tuple[int, ...], Meta(max_length=SHARDS_LIMIT)] = ()
    mirrored: bool = True  # whether the worker also holds all copies that it should have


class ShardsHeld(Value):
    """Report of the shards that a worker can contribute to the next world.

    Args:
        copies: number of copies of each shard, as configured in the state.
        sealed: newest commit that all ranks have copied and mirrored, according to this worker.
    """

    copies: int
    sealed: Commit | None = None
    # complete shards in each of the two snapshot buffers
    held: Annotated[tuple[HeldCommitShards, ...], Meta(max_length=2)] = ()


class RowBytes(Value):
    """Sizes in bytes of a new shard's rows, by their source.

    Args:
        memory: bytes from this worker's memory, including copies that it kept.
        host: bytes from the memory of another worker on the same host, even one that has exited.
        network: bytes from a worker on another host.
        checkpoint: bytes from a checkpoint in storage.
    """

    memory: int = 0
    host: int = 0
    network: int = 0
    checkpoint: int = 0


def total_rows(parts: Iterable[RowBytes]) -> RowBytes:
    """Return the sums of several workers' bytes, by source."""
    return RowBytes(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


class ShardsPlaced(Value):
    """A worker's part of a sharded state in a world, and the sources from which its rows were restored."""

    shards: int  # number of shards in the world
    shard: int  # shard of this worker
    # other shards that this worker keeps copies of
    keeps: Annotated[tuple[int, ...], Meta(max_length=SHARDS_LIMIT)] = ()
    # whether other workers of the host also map the shard's memory, which therefore survives this worker
    lasting: bool = False
    # restored commit, numbered as in `HeldCommitShards.commit`; None if the state was restored from a checkpoint
    restored: Commit | None = None
    rows: RowBytes = RowBytes()  # sizes of this worker's rows, by source
    received: int = 0  # number of bytes of these rows that other workers sent
    # shards of the restored commit whose owner is not in this world, and this worker's rows from them
    lost: Annotated[tuple[int, ...], Meta(max_length=SHARDS_LIMIT)] = ()
    lost_rows: RowBytes = RowBytes()


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base class of all messages on a control connection."""


# ---- the handshake -------------------------------------------------------------------------------


class Challenge(Message):
    """First frame from the driver, which requests proof that the peer has the job's secret."""

    nonce: bytes
    version: int = VERSION


class Answer(Message):
    """Worker's answer to the challenge: its proof, and its own challenge to the driver."""

    worker: Worker
    nonce: bytes
    proof: bytes
    version: int = VERSION


class Accepted(Message):
    """Driver's acceptance of a worker, with the driver's own proof that it has the secret."""

    proof: bytes


class TurnedAway(Message):
    """Driver's refusal of an authenticated peer, sent instead of Accepted.

    ``proof`` is the driver's proof over this reason.
    """

    reason: str
    proof: bytes


# ---- worker -> driver ----------------------------------------------------------------------------


class Hello(Message):
    """First message after the handshake. ``torch_version`` is empty if unknown."""

    worker: Worker
    pid: int
    torch_version: str = ""


class Reconnected(Message):
    """First message on a connection that replaces a lost one. Messages without an answer are sent again after it.

    Args:
        generation: generation of the last world that the worker received.
        welcomed: whether the driver has answered Hello.
    """

    generation: int
    welcomed: bool


class Layout(Message):
    """Names, shapes and dtypes of this worker's state. Sent once, before the first Ready that contains the digest."""

    digest: str
    text: str


class StepInput(Message):
    """Format of this worker's batches, as described by its framework. Sent to joining workers in `Welcome`."""

    kind: Annotated[bytes, Meta(max_length=STEP_INPUT_LIMIT)]


class Ready(Message):
    """Notice that this worker waits for a world.

    ``generation`` is the worker's last generation, or 0 if it had none.
    """

    generation: int
    commit: Commit | None
    # address, already bound, at which this worker would serve the generation's store as rank 0
    store: Address
    layout: str = ""  # digest of the state's layout, empty before elastic.run
    running: bool = True  # whether the worker is inside elastic.run; False in init()
    # number of times that this process has waited for a world; a delayed Ready with a smaller number is ignored
    number: int = 0
    # shards that the worker holds, or None if its state is not sharded
    shards: ShardsHeld | None = None
    kept: OlderCommits = OlderCommits()
    step: int | None = None  # step counter of the state at the worker's newest commit, or None
    # whether this worker stops for a planned change independently of some members, see `Checked`
    own_pace: bool = False
    metadata: Metadata = {}  # see `World.metadata`
    source: Source = {}  # see `World.source`


class Failed(Message):
    """Report that a collective of this generation failed on this worker.

    Args:
        differs: whether the ranks made different calls, which ``calls`` lists.
    """

    generation: int
    reason: str
    differs: bool = False
    calls: Calls = ()


class Stranded(Message):
    """Notice that a collective failed outside ``elastic.run``, so this process cannot recover.

    For the fields, see `Failed`.
    """

    generation: int
    reason: str
    differs: bool = False
    calls: Calls = ()


class Checked(Message):
    """Answer to Prepare, with the number of safepoints passed. The worker stops at the next safepoint.

    ``group`` names the workers that must stop at the same safepoint as this worker, or is empty for all members.
    """

    generation: int
    change: int
    check: int
    group: str = ""


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
    """Current activity of the training thread: a wait in a collective, or a long phase.

    Sent when the thread has waited in one collective for a while, when that wait ends, and at the start and end of a
    phase that the user marks as long. Nothing is sent in steps without a long wait.
    """

    generation: int
    entered: int  # number of collectives that the worker has entered in this generation
    inside: str = ""  # name of the collective in which the worker waits; empty if it does not
    waited_s: Finite = 0.0  # seconds that the worker has waited in the collective
    phase: str = ""  # name of the worker's current long phase; empty outside one
    # progress of the worker's GPU during the wait
    gpu: Annotated[list[Launches], Meta(max_length=LAUNCHES_LIMIT)] = []
    line: str = ""  # script line at which the worker waits, or empty if unknown


class Located(Message):
    """Answer to `Locate`: the line of the script that this worker is executing."""

    generation: int
    line: str  # script line, or empty if unknown


class Pace(Message):
    """Statistics of collectives since the previous Pace message.

    A worker that waits much less than its peers is a straggler.
    """

    generation: int
    collectives: int  # number of completed collectives
    waited_s: Finite  # seconds that the training thread spent in collectives
    over_s: Finite  # length in seconds of the period that the report covers
    commits: int = 0  # number of commits in this period
    commit: Commit | None = None  # newest commit on which all members have agreed


class TimeSpent(Message):
    """Report of the time that this worker has spent on each activity since ``init()``.

    Sent periodically, when training begins in a world, and at exit.
    """

    generation: int
    times: Times
    doing: Part  # current activity of the worker
    commit: Commit | None = None  # newest commit on which all members have agreed
    step: int | None = None  # step counter of the state at the newest commit, or None
    # number of optimizer steps since training began, or None if no step was observed
    steps: int | None = None
    # number of samples per optimizer step on this worker, or None if unknown
    batch: int | None = None
    sealed: Commit | None = None  # newest sealed commit of a sharded state; see `ShardsHeld`
    every: int = 1  # number of commit() calls per copy of the state; see --commit-budget


class Digested(Message):
    """Digest of the parameters of a commit. In tests, it also contains the samples trained since the previous commit.

    Args:
        step: next step after the commit if the state has `Shards`, else -1.
        tensors: if requested, digest of each tensor of the state, by name.
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
    """Verdict of a vote of the ranks: one rank computed wrong gradients of a shard. See `elastic.exact.verifier`.

    Every rank sends it. Digests are 16 hexadecimal digits, or ``not finite`` or ``too large``.
    """

    generation: int
    step: int
    shard: int
    rank: int  # rank that computed the wrong gradients
    digest: Annotated[str, Meta(max_length=16)]  # digest of the wrong gradients
    right: Annotated[str, Meta(max_length=16)]
    # ranks that computed the correct gradients
    witnesses: Annotated[list[int], Meta(max_length=16)]
    # last step of this world in which that rank's gradients were checked and correct, or -1 for none
    agreed: int = -1
    # whether all gradients are checked before they are used, so that no commit can contain wrong ones
    complete: bool = False


class MistakeFound(Message):
    """Report by rank 0 of a mistake in the script that its checks have found. See `elastic.script_checks.mistakes`.

    Args:
        kind: kind of the mistake, as in docs/script-checks.md.
        text: the mistake, its consequence and the remedy, in one line.
    """

    kind: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=MISTAKE_LIMIT)]


class Merged(Message):
    """Report by rank 0 of a merge of `elastic.DiLoCo`. Sent at most once a second, and when the absent islands change.

    Args:
        merges: number of merges so far in the job.
        position: number of inner steps so far in the job.
        islands: number of islands in the world.
        absent: names of at most `ABSENT_LIMIT` islands for which the merge did not wait.
        waited_s: seconds that this rank has waited for merges in inner steps since its previous message.
        names: names of at most `ABSENT_LIMIT` islands in the world. Empty if this rank sent the same names less than a
            minute ago in this generation.
    """

    generation: int
    merges: Annotated[int, Meta(ge=0)]
    position: Annotated[int, Meta(ge=0)]
    islands: Annotated[int, Meta(ge=1)]
    absent: IslandNames
    waited_s: Finite = 0.0
    names: IslandNames = []


class Raised(Message):
    """Report that user code raised an exception, and that the process is about to exit with the traceback."""

    generation: int
    commit: Commit | None
    summary: str
    traceback: str
    # whether a GPU or NCCL has failed, see `elastic.runtime.failures.hardware_errors`
    hardware: bool = False
    final: bool = False  # whether a retry would fail in the same way
    # whether training has not begun: no worker of the world had a commit, and none was made in this world
    beginning: bool = False
    code: Annotated[int, Meta(ge=1, le=255)] = 1  # exit code of the job, if final
    calls: Calls = ()  # mismatched calls, as reported to all ranks
    # whether shards of the state were lost, which makes the failure final
    shards_lost: bool = False


class Quit(Message):
    """Notice that the process is about to exit with this code (0 to 255).

    Sent if user code called ``sys.exit`` under ``elastic.run``, or if the worker's state does not match that of the
    world.

    Args:
        call: text of the call, such as ``sys.exit(3)``. Empty if user code made no call.
    """

    generation: int
    code: int
    call: str = ""


class Returned(Message):
    """Notice that the function under ``elastic.run`` has returned."""

    generation: int


class SendResult(Message, tag="Result"):
    """Return value of a launched function. The driver does not decode it."""

    blob: bytes


class Reported(Message):
    """Metrics that the script reports to the program that started the job.

    Reports are delivered exactly once, in the order of their numbers. See `report_queue`.
    """

    number: int  # number of the report, counted per process from 1
    # number of the first report that may not have been delivered; all earlier reports have been delivered
    oldest: int
    generation: int  # generation at the time of the report; rank and size are from the same time
    rank: int
    size: int
    at: Finite  # time of the report in seconds since 1970
    # encoded metrics, which agents do not decode
    metrics: Annotated[bytes, Meta(max_length=REPORT_LIMIT)]
    # number of reports that were dropped before this one because the queue was full
    dropped: int = 0


Trace = tuple[
    str, str, str, int, int
]  # kind, row, name, start (ns) and duration (ns) of each record; see trace_buffer


class ClockAsked(Message):
    """Request for the driver's clock. ``asked_ns`` is on this worker's monotonic clock."""

    asked_ns: int


class Traced(Message):
    """Timeline records of this worker. Adding ``offset_ns`` converts their times to the driver's clock."""

    timeline: int
    offset_ns: int
    records: Annotated[list[Trace], Meta(max_length=TRACES_LIMIT)]
    # number of records dropped since the previous message, because the buffer was full
    dropped: int = 0


class TracedAll(Message):
    """Notice that this worker has sent all its records of a stopped timeline."""

    timeline: int


class TimelineWanted(Message):
    """Request by the script to start a timeline in this file, an absolute path on the driver's host."""

    request: int
    path: str
    mark_cycles: bool


class TimelineUnwanted(Message):
    """Request by the script to stop this timeline. The answer is sent when the file is complete."""

    request: int
    timeline: int


class CheckpointDue(Message):
    """Request by rank 0 to make a commit durable on all ranks.

    The commit is the first one of this generation whose number is at least ``number``.
    """

    generation: int
    number: int


class NotFinite(Message):
    """Report that gradients have been infinite or NaN since before this commit.

    Sent at the first such commit of a world, and repeated until gradients are finite again.

    Args:
        digest: digest of this rank's parameters before the first step with such gradients, or None if the rank did not
            take part in that step.
    """

    generation: int
    commit: Commit
    digest: int | None


class ShareWritten(Message):
    """Report that this rank has written its part of checkpoint ``number`` to storage."""

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
    """Report that a checkpoint is complete in storage, and was verified by reading it back.

    Args:
        commit: commit that the checkpoint contains.
    """

    generation: int
    number: int
    commit: Commit
    place: str  # directory of the commit in storage
    size: int  # size of the checkpoint in bytes
    took_s: Finite
    step: int | None = None  # step counter of the state, or None


# ---- driver -> worker ----------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello, with a provisional place in the world.

    Args:
        newcomer: if a world is already training, the format of its batches as in the last `StepInput`, possibly empty.
            Otherwise None.
    """

    place: Place
    newcomer: bool
    elastic: bool
    step_input: Annotated[bytes, Meta(max_length=STEP_INPUT_LIMIT)] = b""


class World(Message):
    """Notice that a new world has formed, with the receiver's place in it.

    Ranks ``0 .. holders-1`` hold ``commit``, the newest commit, and the other ranks receive it. If no worker has
    committed, ``holders`` is 0 and ``commit`` is None, and rank 0 is the source of the state.

    Args:
        copies: groups of ranks in which the commit is sent: the sender, followed by the receivers. If empty, rank 0
            sends it to all ranks that lack it.
        run: ID under which all workers write this world's checkpoints, or 0 without checkpoints. The ID changes when
            another driver takes over in a failover.
        checkpoint: whether to make the initial commit durable before training starts.
        metadata: metadata that the members have sent with Ready, by rank, so that they need not exchange it. Empty if
            the world is larger than `MEMBERS_WITH_METADATA` or does not begin from the newest commit of its members, in
            which case the members exchange these values themselves.
        source: the values that rank 0 has sent with Ready in case it becomes the source of the state. Empty whenever
            ``metadata`` is empty.
    """

    generation: int
    place: Place
    store: Address
    holders: int
    commit: Commit | None
    reason: str
    run: int = 0
    checkpoint: bool = False
    copies: list[list[int]] = []
    metadata: list[Metadata] = []
    source: Source = {}

    @property
    def lacking(self) -> range:
        """Ranks that receive the state, because they do not hold the newest commit."""
        return range(max(1, self.holders), self.place.size)

    @property
    def copying(self) -> tuple[int, ...]:
        """Ranks of the group in which this rank sends or receives the state, the sender first, or ()."""
        found = (group for group in self._groups if self.place.rank in group and len(group) > 1)
        return tuple(next(found, ()))

    @property
    def senders(self) -> dict[int, int]:
        """Ranks that receive the state, each with the rank that sends it."""
        return {rank: sender for sender, *receivers in self._groups for rank in receivers}

    @property
    def _groups(self) -> list[list[int]]:
        return self.copies if self.copies and self.holders else [[0, *self.lacking]]


class Broken(Message):
    """Notice that this generation has ended.

    The receiver closes its sockets, restores the last commit, and sends Ready.
    """

    generation: int
    reason: str


class Prepare(Message):
    """Announcement of a planned change.

    The receiver answers with the number of safepoints passed, and waits at the next one.
    """

    generation: int
    change: int


class StopAt(Message):
    """Order, sent to all workers of a group, to stop at this safepoint. See `Checked`."""

    generation: int
    change: int
    check: int


class Proceed(Message):
    """Notice that the planned change was cancelled, so the receiver continues."""

    generation: int
    change: int


class Leave(Message):
    """Order to leave the job and to exit with code 0, or with code 1 if ``fenced``.

    Args:
        fenced: whether the driver has fenced the worker and discards its later work.
    """

    reason: str
    fenced: bool = False


class Restate(Message):
    """Request to report the current status again (see `Reconnected`), because messages may have been lost.

    The agent sends this request to its workers after it has reconnected.
    """


class Locate(Message):
    """Request for the script line that the receiver is executing, because other ranks wait for it."""


class Awaited(Message):
    """Notice that the receiver is waiting for this rank, with the script line that the rank is executing."""

    generation: int
    rank: int
    line: str


class Rejected(Message):
    """Notice that the receiver's state does not match that of the world. ``reason`` names the difference."""

    reason: str


class StandBy(Message):
    """Order to wait as a standby without a timeout, because the world has its maximum size."""


class Finish(Message):
    """Notice that the training function has returned on every worker of the world."""

    generation: int


class End(Message):
    """Notice that the job has failed. The receiver aborts blocking calls and exits."""

    reason: str


class ClockTold(Message):
    """Answer to ClockAsked: when it was received and when it was answered, on the driver's monotonic clock."""

    asked_ns: int
    heard_ns: int
    told_ns: int


class ReportsTaken(Message):
    """Acknowledgement that all reports up to this number were delivered, so the worker can discard them."""

    number: int


class Tracing(Message):
    """Order to start recording this timeline or, if ``on`` is False, to stop and send the remaining records."""

    timeline: int
    on: bool
    mark_cycles: bool = False


class HostsListed(Message):
    """Notice that the list of hosts has changed.

    The notice is passed to listeners in the script. A change of the world is announced by Prepare.
    """


class TracesTaken(Message):
    """Acknowledgement that a `Traced` was written to the file, so the worker may send another."""

    timeline: int


class TimelineAnswer(Message):
    """Answer to a timeline request. ``error`` is empty on success. The other fields describe the current timeline."""

    request: int
    timeline: int
    path: str = ""
    error: str = ""


class MakeDurable(Message):
    """Order to write to storage the first commit of this generation whose number is at least ``number``."""

    generation: int
    number: int


class CheckpointSoon(Message):
    """Request for a final checkpoint, because the job is stopping or its machines are being preempted.

    Rank 0 starts it.
    """

    generation: int


class SealCheckpoint(Message):
    """Order to rank 0 to complete the checkpoint by writing the manifest, because all parts were written."""

    generation: int
    number: int


class DropCheckpoint(Message):
    """Order to stop writing a checkpoint that was cancelled.

    Args:
        again: whether the checkpoint will be retried, because the request for it reached a rank too late.
    """

    generation: int
    number: int
    again: bool = False


class CheckpointDone(Message):
    """Notice that the checkpoint is complete, with the commit that it contains."""

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
    """Encode a message as the body of a frame. Raises ProtocolError if it exceeds ``limit`` bytes."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:  # An error message may contain a file name that is not valid UTF-8.
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        body = _encoder.encode(_sayable(plain))
    if len(body) > limit:
        raise ProtocolError(
            f"{type(message).__name__} has {len(body)} bytes, but the limit is {limit}: pass smaller values"
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
