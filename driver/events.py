"""What membership is told (events, past tense) and what it asks for (actions, imperative). Pure: values only.

They are msgspec structs, so that the journal can write each as one JSON object and read it back.
"""

from __future__ import annotations

import msgspec

from elastic.driver.reasons import Reason
from elastic.protocol.calls import Called
from elastic.protocol.messages import (
    Address,
    Commit,
    Finite,
    Launches,
    Part,
    Place,
    Times,
    Value,
    Worker,
)


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened outside."""


class HostsChanged(Event):
    """Discovery's whole list, in order of preference."""

    hosts: dict[str, int]


class WorkerConnected(Event):
    """The process has called ``init()``."""

    worker: Worker
    pid: int
    torch_version: str = ""


class WorkerReconnected(Event):
    """It has a new connection in place of a lost one; see protocol.Reconnected."""

    worker: Worker
    generation: int
    welcomed: bool


class WorkerReady(Event):
    """It waits for a world; see protocol.Ready."""

    worker: Worker
    generation: int
    commit: Commit | None
    store: Address
    layout: str = ""
    running: bool = True
    number: int = 0


class WorkerFailed(Event):
    """A collective broke at this worker. ``differs``: its ranks have called different ones, ``calls``."""

    worker: Worker
    generation: int
    reason: str
    differs: bool = False
    calls: tuple[Called, ...] = ()


class WorkerStranded(Event):
    """A collective broke at a worker that cannot recover: it is outside ``elastic.run``. ``differs`` as above."""

    worker: Worker
    generation: int
    reason: str
    differs: bool = False
    calls: tuple[Called, ...] = ()


class WorkerChecked(Event):
    """Answer to PrepareChange."""

    worker: Worker
    generation: int
    change: int
    check: int


class WorkerLeaving(Event):
    """It got SIGTERM and wants to leave at its next commit."""

    worker: Worker
    reason: str


class WorkerResumed(Event):
    """Its first collective of the generation completed. ``from_checkpoint``: see `protocol.messages.Resumed`."""

    worker: Worker
    generation: int
    phases_ms: dict[str, float]
    copied_bytes: int = 0
    from_checkpoint: bool = False


class WorkerDigested(Event):
    """The digest of its parameters under a commit."""

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


class WorkerProgressed(Event):
    """It waits in a collective, or no longer, or is in a phase that the user marks as long; see protocol.Progress."""

    worker: Worker
    generation: int
    entered: int
    inside: str = ""
    waited_s: Finite = 0.0
    phase: str = ""
    gpu: list[Launches] = []
    line: str = ""


class WorkerLocated(Event):
    """At which line of the script one is for whom others wait; see protocol.Located."""

    worker: Worker
    generation: int
    line: str


class WorkerPaced(Event):
    """How much of the last seconds it spent inside collectives; see protocol.Pace."""

    worker: Worker
    generation: int
    collectives: int
    waited_s: Finite
    over_s: Finite
    commits: int = 0
    commit: Commit | None = None


class WorkerSpent(Event):
    """How its time went since ``init()``; see protocol.TimeSpent. Nothing is decided by it."""

    worker: Worker
    generation: int
    times: Times
    doing: Part
    commit: Commit | None = None
    step: int | None = None
    steps: int | None = None
    batch: int | None = None


class WorkerFrozen(Event):
    """Its lease ran out: its agent has not seen it able to run for that long. ``how``: why, as seen from outside."""

    worker: Worker
    how: str


class WorkerThawed(Event):
    """A frozen one runs again."""

    worker: Worker


class WorkerProbed(Event):
    """Answer to ProbeWorkers: what the process did so far, as its host's kernel counts it.

    ``cpu_s``: seconds of processor time of the process and its children; ``io_bytes``: read and written, cached or not.
    ``state``: one letter as in /proc/PID/stat. ``traced``: a debugger is attached.
    """

    worker: Worker
    cpu_s: Finite
    io_bytes: int
    state: str
    traced: bool = False


class WorkerRaised(Event):
    """User code raised; the process is about to exit."""

    worker: Worker
    generation: int
    commit: Commit | None
    summary: str
    traceback: str
    hardware: bool = False  # a GPU or NCCL has failed, and not the script
    final: bool = False  # whoever tries it again ends in the same way
    # Of the training: no member of its world had a commit, and it has made none.
    beginning: bool = False
    code: int = 1  # of the job, if final
    calls: tuple[Called, ...] = ()  # that do not fit together, of which all ranks were told
    shards_lost: bool = False  # no worker holds some shards of the state any more; final


class WorkerQuit(Event):
    """User code called ``sys.exit`` under ``elastic.run``; the process is about to exit with this code. ``call``:
    ``sys.exit(3)``.
    """

    worker: Worker
    generation: int
    code: int
    call: str = ""


class WorkerReturned(Event):
    """The function under ``elastic.run`` returned."""

    worker: Worker
    generation: int


class WorkerDisconnected(Event):
    """Its control connection closed. An exit usually follows at once; if none does, it must be
    fenced. ``silent``: nothing was closed, but its host acknowledges nothing any more.
    """

    worker: Worker
    silent: bool = False


class WorkerExited(Event):
    """The process is gone and reaped. ``code``: exit status, or minus the signal, as in subprocess.

    ``reason`` is set when it could not even be started. ``output`` is the tail of its stderr. ``out_of_memory``: the
    kernel has killed it because memory ran out.
    """

    worker: Worker
    code: int
    reason: str = ""
    output: str = ""
    out_of_memory: bool = False


class HostLost(Event):
    """The lease of a host's agent ran out: nothing there can be killed, or be told anything."""

    host: str
    reason: str


class Notice(Value):
    """A machine has announced its end. ``text``: who says so, and what; ``within_s``: until then, None if that is not
    known.
    """

    text: str
    within_s: Finite | None = None


class HostReported(Event):
    """The agent of a host has a new connection: these are the workers that run there.

    ``ordered``: those that it was told to start before; who is among them and does not run is gone. Others may be on
    their way to it. None: everybody was. ``notice``: of the end of its machine, if one stands.
    """

    host: str
    running: list[Worker]
    ordered: list[Worker] | None = None
    notice: Notice | None = None


class HostLeaving(Event):
    """The machine of a host has announced its end. ``alone``: the driver runs there too, and ends with it."""

    host: str
    notice: Notice
    alone: bool = False


class HostStaying(Event):
    """What it had announced is off."""

    host: str


class DriverRestarted(Event):
    """What came before this was read from the journal. Nobody is connected yet, and whatever was decided last may not
    have been done.
    """


class StopRequested(Event):
    """Ctrl-C or SIGTERM at the driver, or a caller's request. ``code``: the exit code that this asks for.
    ``checkpoint_s``: so long may a last checkpoint take, where there are any.
    """

    reason: str
    code: int | None = None
    checkpoint_s: float = 0.0


class ScaleRequested(Event):
    """An operator wants the job to have so many workers. ``request``: a number by which it is answered, as is each."""

    request: int
    workers: int


class DrainRequested(Event):
    """An operator wants no worker on this host any more; ``off``: may have some there again."""

    request: int
    host: str
    off: bool = False


class RemoveRequested(Event):
    """An operator wants this worker to leave."""

    request: int
    worker: Worker


class CheckpointMade(Event):
    """A commit is in the storage, whole: no failure can take it away any more."""

    commit: Commit


class WorkerDiffers(Event):
    """Its ``parts`` of a commit are not those of ``equal`` others, that were the same in all of them before: its memory
    was damaged.
    """

    worker: Worker
    generation: int
    commit: Commit
    parts: list[str]
    equal: int


class ReplicasSpoilt(Event):
    """Gradients that were infinite or NaN have made all replicas worthless, ``commit`` and others in memory with them:
    the memory of one worker was damaged. ``damaged``: those whose parameters before that differed from those of
    ``equal`` others. Older journals name them before, as WorkerDiffers.
    """

    generation: int
    commit: Commit
    damaged: list[Worker] = []
    equal: int = 0


class TimePassed(Event):
    """A deadline that ``next_deadline()`` named was reached."""


class Action(msgspec.Struct, frozen=True, tag=True):
    """Something to do outside."""


class StartWorker(Action):
    """Start this incarnation, with a provisional place."""

    worker: Worker
    place: Place
    reason: Reason


class KillWorker(Action):
    """SIGKILL the worker's whole process group; its exit comes back as WorkerExited."""

    worker: Worker
    reason: Reason


class ProbeWorkers(Action):
    """Ask their agents what these processes do; each answer comes back as WorkerProbed."""

    workers: list[Worker]


class TellAwaited(Action):
    """Tell these members for whom they wait, and at which line of the script that one is."""

    generation: int
    members: list[Worker]
    rank: int
    line: str


class DumpStacks(Action):
    """Have the process write the Python stacks of all its threads, whatever it is doing."""

    worker: Worker
    reason: Reason


class BreakWorld(Action):
    """Tell these members that the generation is over."""

    generation: int
    members: list[Worker]
    reason: Reason


class Member(msgspec.Struct, frozen=True):
    worker: Worker
    place: Place


class PublishWorld(Action, omit_defaults=True):
    """A new generation; see protocol.World for what each member is told. Journals of earlier versions lack
    ``checkpoint``, and are replayed to the same bytes.
    """

    generation: int
    members: list[Member]  # in rank order
    store: Address
    holders: int
    commit: Commit | None
    reason: Reason
    checkpoint: bool = False


class TellWorld(Action, omit_defaults=True):
    """Tell one member again of the world that it is in: it has lost its connection and may not have heard."""

    generation: int
    member: Member
    store: Address
    holders: int
    commit: Commit | None
    reason: Reason
    checkpoint: bool = False


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
    """Tell the worker to leave: it ends with exit code 0, or, if it was ``fenced``, with 1."""

    worker: Worker
    reason: Reason
    fenced: bool = False


class RejectWorker(Action):
    """Its layout differs from the world's. The loop words the difference from the two texts."""

    worker: Worker
    layout: str
    expected: str


class TellStandby(Action):
    """Tell a worker that the world has no place for it now; it is to wait for one."""

    worker: Worker


class FinishWorld(Action):
    generation: int
    members: list[Worker]


class GiveUpHost(Action):
    """Take a host for lost, although its agent is connected. `HostLost` follows, where hosts have agents."""

    host: str
    reason: Reason


class HastenCheckpoint(Action):
    """Have rank 0 make one of its next commits durable, whatever else is due. All members hear of it: a job may end."""

    generation: int
    rank0: Worker


class EndJob(Action):
    """The job is over. Code 0 is success. On failure every worker that is left is told and then killed."""

    code: int
    reason: Reason


class AnswerRequest(Action):
    """Tell the operator that this is being done, or why it is not."""

    request: int
    done: bool
    reason: Reason


class Report(Action):
    """A line for the log. Levels: info, warning, error. ``about``: the reason that it gives, where one asks."""

    level: str
    text: str
    about: Reason | None = None


class ReportRecovery(Action, omit_defaults=True):
    """Every member has resumed after a failure or a planned change. Milliseconds since the cause was noticed.
    ``from_checkpoint``: survivors went back to a durable commit. Journals of earlier versions lack it, and are replayed
    to the same bytes.
    """

    generation: int
    kind: str  # "recovery" or "change"
    reason: Reason
    size: int
    total_ms: float
    phases_ms: dict[str, float]
    copied_bytes: int
    from_checkpoint: bool = False
