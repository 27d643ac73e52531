"""Every message between driver and worker, and the words both sides share. Pure: bytes in, values out.

A connection opens with a mutual challenge (see `Challenge`), then carries sealed frames (see `framing`). Messages are
tagged by their class name, schema-checked by msgspec when decoded, never pickled. Every message that concerns a world
carries its generation.

Nothing that a worker is sent when the world changes grows with the size of the world.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elastic.protocol.calls import Calls

VERSION = 4
FRAME_LIMIT = 64 * 1024 * 1024  # bytes; a returned value is the only large message
RESULT_LIMIT = FRAME_LIMIT - 4096  # bytes of a returned value
RELAY_LIMIT = FRAME_LIMIT + 4096  # bytes; the same, and who said it
HANDSHAKE_LIMIT = 1024  # bytes a peer may send before it is authenticated
# Small things in a list take far more room than they have bytes: a frame may hold no more of them than anybody sends.
PHASES_LIMIT = 1000
SAMPLES_LIMIT = 1_000_000
TRACES_LIMIT = 100_000
TENSORS_LIMIT = 100_000
LAUNCHES_LIMIT = 64  # groups on one GPU
REPORT_LIMIT = 64 * 1024  # bytes of what a script reports at once
STEP_INPUT_LIMIT = 16 * 1024  # bytes
COPY = "copy of the state"  # by this name a worker waits in one
SHARDS_COMMIT = "commit of the shards"  # and by this one in a commit of a sharded state
GRADIENTS = "gradients"  # and by this one in a step of a DistributedOptimizer
STACKS_SIGNAL_OFFSET = 4  # above SIGRTMIN: the signal at which a worker writes its stacks


# Not a number, or infinite, would be lost in a journal.
Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class ProtocolError(Exception):
    """The peer sent bytes that are no message of this protocol, or is not who it claims to be."""


class Value(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A small immutable value inside messages."""


class Worker(Value):
    """One incarnation of one slot: the identity of a training process."""

    host: str
    slot: int
    incarnation: int = 1

    def __str__(self) -> str:
        return f"{self.host}:{self.slot}#{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """The inverse of ``str``. Raises ValueError on anything else."""
        place, _, incarnation = text.rpartition("#")
        host, _, slot = place.rpartition(":")
        if not host:
            raise ValueError(f"{text!r} is not a worker; expected host:slot#incarnation")
        return cls(host, int(slot), int(incarnation))

    def next(self) -> Worker:
        return Worker(self.host, self.slot, self.incarnation + 1)


class Commit(Value):
    """The identity of a committed state: the n-th commit of a generation. Later ones compare greater.

    Shown as ``g2c300``: ids are no decimal numbers.
    """

    generation: int
    number: int

    def __str__(self) -> str:
        return f"g{self.generation}c{self.number}"

    @property
    def dotted(self) -> str:
        """``2.300``, as it stands in journals."""
        return f"{self.generation}.{self.number}"


class Address(Value):
    host: str
    port: int

    def __str__(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Times(Value):
    """How many seconds of a worker went to what; see `elastic.monitoring.time_account`. They add up to its age."""

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
    """Where one worker stands in a world. Ranks count over the world, the host, and the hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Launches(Value):
    """How far a worker's GPU has come with the collectives of one group, which all its ranks launch in one order."""

    group: str  # the same on all its ranks, and no other group's
    size: int  # ranks of the group
    launched: int
    arrived: int  # the GPU has come to so many of them
    done: int  # and so many have ended
    took_s: Finite = 0.0  # the longest from a launch until the GPU had come to it, in seconds
    failed: bool = False  # CUDA answers with an error


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base of everything that travels on a control connection."""


# ---- the handshake -------------------------------------------------------------------------------


class Challenge(Message):
    """Driver's first frame: prove that you know the job's secret."""

    nonce: bytes
    version: int = VERSION


class Answer(Message):
    """Worker's reply, with a challenge of its own."""

    worker: Worker
    nonce: bytes
    proof: bytes
    version: int = VERSION


class Accepted(Message):
    """Driver's proof that it knows the secret too."""

    proof: bytes


class TurnedAway(Message):
    """Instead of Accepted, to one who has proved to know the secret. ``proof`` is the driver's, of this reason."""

    reason: str
    proof: bytes


# ---- worker -> driver ----------------------------------------------------------------------------


class Hello(Message):
    """First message after the handshake. ``torch_version``: empty if not told."""

    worker: Worker
    pid: int
    torch_version: str = ""


class Reconnected(Message):
    """First message on a connection that replaces a lost one. What had no answer yet is said again after it.

    ``generation`` is the last world that it was told; ``welcomed``: it has had an answer to its Hello.
    """

    generation: int
    welcomed: bool


class Layout(Message):
    """The names, shapes and dtypes of this worker's state, sent once before the first Ready that carries its digest."""

    digest: str
    text: str


class StepInput(Message):
    """Of what this worker's batches consist, in its framework's words: for those who join, see `Welcome`."""

    kind: Annotated[bytes, Meta(max_length=STEP_INPUT_LIMIT)]


class Ready(Message):
    """I wait for a world. ``generation`` is the last one I was part of (0: none)."""

    generation: int
    commit: Commit | None
    store: Address  # already bound: where this worker would serve the generation's store as rank 0
    layout: str = ""  # digest of the state's layout; empty before elastic.run
    running: bool = True  # False while still in init(), before elastic.run
    number: int = 0  # of this process's waits: an older Ready that comes late counts no more


class Failed(Message):
    """A collective of this generation broke here. ``differs``: its ranks have called different ones, ``calls``."""

    generation: int
    reason: str
    differs: bool = False
    calls: Calls = ()


class Stranded(Message):
    """A collective broke outside ``elastic.run``: this process can't recover. ``differs``, ``calls``: see `Failed`."""

    generation: int
    reason: str
    differs: bool = False
    calls: Calls = ()


class Checked(Message):
    """Answer to Prepare: checks passed so far; held at the next one."""

    generation: int
    change: int
    check: int


class Leaving(Message):
    """This worker was asked (SIGTERM) to leave at its next commit."""

    reason: str


class Resumed(Message):
    """The first collective of a generation completed here. Milliseconds by phase, in order. ``from_checkpoint``: no
    whole commit was left in memory, so the world began with a durable one.
    """

    generation: int
    phases_ms: Annotated[dict[str, Finite], Meta(max_length=PHASES_LIMIT)]
    copied_bytes: int = 0
    from_checkpoint: bool = False


class Progress(Message):
    """Where the training thread is. Sent when it has waited for a while in one collective, when that wait is over, and
    at both ends of a phase that the user marks as long; never in a step in which nobody waits for long.
    """

    generation: int
    entered: int  # collectives entered in this generation
    inside: str = ""  # the collective that it waits in, by name; empty: it does not wait
    waited_s: Finite = 0.0  # seconds it has been in there
    phase: str = ""  # the long phase that it is in; empty: none
    gpu: Annotated[list[Launches], Meta(max_length=LAUNCHES_LIMIT)] = []  # while it waits
    line: str = ""  # of the script, at which it waits; empty: not known


class Located(Message):
    """The answer to `Locate`."""

    generation: int
    line: str  # of the script; empty: not known


class Pace(Message):
    """How it went since the last one of these: who waits little while the others wait much holds them up."""

    generation: int
    collectives: int  # completed
    waited_s: Finite  # seconds of them in which the training thread was inside a collective
    over_s: Finite  # seconds
    commits: int = 0  # made in that time
    commit: Commit | None = None  # the newest, of those that all agree on


class TimeSpent(Message):
    """How this worker's time went since ``init()``. Sent now and then, as training begins in a world, and last."""

    generation: int
    times: Times
    doing: Part  # now
    commit: Commit | None = None  # the newest, of those that all agree on
    step: int | None = None  # the state's own at the newest commit, where it has one
    steps: int | None = None  # of an optimizer, since the training began; None: none was seen
    batch: int | None = None  # samples of such a step on this worker, where that is known


class Digested(Message):
    """Digest of the parameters held under a commit; in tests also which samples were trained since the last one.

    ``step``: the step that follows the commit, where the state has shards; -1: it has none. ``tensors``: a digest of
    each tensor of the state by its name, where they were asked for. ``gradients``: then also of the last step's, before
    any sum, by ``3 layer.weight``: the shard, of those that this worker has computed, and the parameter.
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


class Raised(Message):
    """User code raised: the process is about to exit with this traceback."""

    generation: int
    commit: Commit | None
    summary: str
    traceback: str
    # A GPU or NCCL has failed: see `elastic.runtime.failures.hardware_errors`.
    hardware: bool = False
    final: bool = False  # whoever tries it again ends in the same way
    # Of the training: no member of its world had a commit, and it has made none.
    beginning: bool = False
    code: Annotated[int, Meta(ge=1, le=255)] = 1  # of the job, if final
    calls: Calls = ()  # that do not fit together, of which all ranks were told
    shards_lost: bool = False  # no worker holds some shards of the state any more; final


class Quit(Message):
    """The process is about to exit with this code (0 to 255): user code called ``sys.exit`` under ``elastic.run``, or
    its state does not match. ``call``: ``sys.exit(3)``, empty where user code called nothing.
    """

    generation: int
    code: int
    call: str = ""


class Returned(Message):
    """The function under ``elastic.run`` returned."""

    generation: int


class SendResult(Message, tag="Result"):
    """The value of a launched function, opaque to the driver."""

    blob: bytes


class Reported(Message):
    """What the script says of its training, for whoever has started the job. Taken in the order of the numbers, each
    once; see `report_queue`.
    """

    number: int  # of this process's reports, from 1
    oldest: int  # the first that may not be taken yet: all before it have been, by this driver or one before it
    generation: int  # it was made in, as were rank and size
    rank: int
    size: int
    at: Finite  # seconds since 1970
    metrics: Annotated[bytes, Meta(max_length=REPORT_LIMIT)]  # agents do not look into it
    dropped: int = 0  # that were made since the one before, and found no room


Trace = tuple[str, str, str, int, int]  # kind, row, name, nanoseconds, duration: see trace_buffer


class ClockAsked(Message):
    """What time is it at the driver? ``asked_ns`` is this worker's monotonic clock."""

    asked_ns: int


class Traced(Message):
    """What this worker did, for the timeline. ``offset_ns`` added to its times makes them the driver's."""

    timeline: int
    offset_ns: int
    records: Annotated[list[Trace], Meta(max_length=TRACES_LIMIT)]
    dropped: int = 0  # records that found no room since the last message


class TracedAll(Message):
    """This worker has sent everything that it had of this timeline, which is over."""

    timeline: int


class TimelineWanted(Message):
    """The script asks for a timeline in this file; an absolute path on the driver's host."""

    request: int
    path: str
    mark_cycles: bool


class TimelineUnwanted(Message):
    """The script ends this timeline; its file is to be complete when the answer comes."""

    request: int
    timeline: int


class CheckpointDue(Message):
    """Rank 0: make the first commit of this generation from ``number`` on durable, on all ranks."""

    generation: int
    number: int


class NotFinite(Message):
    """Gradients have been infinite or NaN since before this commit. ``digest``: of this rank's parameters before
    the first step with these; None where it has not seen that step. Said at the first such commit of a world, and again
    while that lasts.
    """

    generation: int
    commit: Commit
    digest: int | None


class ShareWritten(Message):
    """This rank's part of the checkpoint that was asked for as ``number`` is in the storage. ``digests``: of what must
    be equal on all ranks, by the name of the part; see `elastic.state.snapshots.digest`.
    """

    generation: int
    number: int
    commit: Commit
    digests: dict[str, int]


class ShareDropped(Message):
    """This rank can't write its part; with it the checkpoint is off. ``timing``: it only came at the wrong time."""

    generation: int
    number: int
    reason: str
    timing: bool = False


class CheckpointWritten(Message):
    """The whole checkpoint is in the storage and was read back. ``commit``: what it holds."""

    generation: int
    number: int
    commit: Commit
    place: str  # its folder
    size: int  # bytes
    took_s: Finite
    step: int | None = None  # the state's own, where it has one


# ---- driver -> worker ----------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello: a provisional place. ``newcomer``: a world is already training, on such batches as the last
    `StepInput` said; empty if nobody did.
    """

    place: Place
    newcomer: bool
    elastic: bool
    step_input: Annotated[bytes, Meta(max_length=STEP_INPUT_LIMIT)] = b""


class World(Message):
    """Your place in a new generation.

    Ranks ``0 .. holders-1`` hold ``commit``, the newest one; the others lack it and are sent it by
    rank 0. ``holders`` is 0 and ``commit`` None where nobody has committed; then rank 0 is the
    source all the same. ``run``: of the checkpoints of this world, 0 where none are written; a
    driver that follows another one has its own, and all members must write under one.
    ``checkpoint``: the commit that all begin with is made durable before they train.
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
    """This generation is over: cut its sockets, restore, say ready."""

    generation: int
    reason: str


class Prepare(Message):
    """A planned change: answer with your number of checks, hold at the next."""

    generation: int
    change: int


class StopAt(Message):
    """All stop at this check."""

    generation: int
    change: int
    check: int


class Proceed(Message):
    """The planned change is off; go on."""

    generation: int
    change: int


class Leave(Message):
    """You are no longer part of the job: end the process with exit code 0. ``fenced``: you have been given up, so that
    what you did since counts for nothing, and the exit code says so.
    """

    reason: str
    fenced: bool = False


class Restate(Message):
    """The driver may not have heard what you said, nor you what it said: say again where you stand (see
    `Reconnected`). Of your agent, when it has a new connection.
    """


class Locate(Message):
    """Others wait for you: say at which line of the script you are."""


class Awaited(Message):
    """You wait for this rank, which is at this line of the script."""

    generation: int
    rank: int
    line: str


class Rejected(Message):
    """Your state does not match the world's; the reason says what differs."""

    reason: str


class StandBy(Message):
    """The world is as large as it may be: this worker waits, for however long, until a place is free."""


class Finish(Message):
    """Every member of the world has returned."""

    generation: int


class End(Message):
    """The job is over without success: abort what is blocked and exit."""

    reason: str


class ClockTold(Message):
    """Answer to ClockAsked: when it was heard and when it was answered, on the driver's monotonic clock."""

    asked_ns: int
    heard_ns: int
    told_ns: int


class ReportsTaken(Message):
    """All reports up to this one: they need not be kept for another driver."""

    number: int


class Tracing(Message):
    """Write down what you do from now on, for this timeline; or, ``on`` False, no longer: send what is left."""

    timeline: int
    on: bool
    mark_cycles: bool = False


class HostsListed(Message):
    """The list of hosts is another one. For scripts that listen; who leaves or joins, and when, is said by Prepare."""


class TracesTaken(Message):
    """One `Traced` is in the file: there is room for another."""

    timeline: int


class TimelineAnswer(Message):
    """What became of a request. ``error``: empty where it was met; ``timeline`` and ``path`` are of the present one."""

    request: int
    timeline: int
    path: str = ""
    error: str = ""


class MakeDurable(Message):
    """Write the first commit of this generation from ``number`` on to the storage."""

    generation: int
    number: int


class CheckpointSoon(Message):
    """A last checkpoint is wanted: the job stops, or its machines go away. Rank 0 asks for one as soon as may be."""

    generation: int


class SealCheckpoint(Message):
    """To rank 0: all parts are written. Write what makes them a checkpoint."""

    generation: int
    number: int


class DropCheckpoint(Message):
    """It will not become whole: write no more of it. ``again``: it only came at the wrong time for somebody."""

    generation: int
    number: int
    again: bool = False


class CheckpointDone(Message):
    """It is whole, and holds this commit."""

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
    """The body of a frame, of a message of ours or between driver and agent. Raises ProtocolError when it is larger."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:  # an error may quote a file name that is not text
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        body = _encoder.encode(_sayable(plain))
    if len(body) > limit:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes; the limit is {limit}")
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
