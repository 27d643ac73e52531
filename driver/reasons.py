"""Reasons for decisions, each consisting of a kind and facts. Pure: no I/O, no clock.

    because(ReasonKind.FROZEN, how="stopped by a signal")      as str(): it is frozen (stopped by a signal)

Code compares kinds only. The texts in SENTENCES are for people, in logs, errors and messages to workers, and may be
reworded at any time. The names of kinds and facts must not change, because journals contain them.
"""

from __future__ import annotations

import enum
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, List, Union  # noqa: UP035

import msgspec

from elastic.driver.tracebacks import exception_line
from elastic.errors import shortened
from elastic.protocol.messages import Commit

ADVICE = "Put the training loop into a function decorated with @elastic.run to survive lost workers"
BEFORE = (
    "Rerun the command, or pass --reset-limit N to restart all workers if one is killed in this phase."
    f" {ADVICE}"
)
GONE = (
    "Commits were in the workers' memory only: restart from a checkpoint that the script saved, with --fresh if"
    " there is a journal"
)


class ReasonKind(enum.Enum):
    """Kind of a `Reason`. Code distinguishes reasons only by their kinds."""

    TOLD = "told"  # text received from outside the driver
    # Reasons for the start of a worker.
    FIRST_START = "first start"
    SLOT_IS_FREE = "slot is free"
    TO_STAND_BY = "to stand by"
    # Reasons for fencing a worker that blocks other workers or would corrupt their results.
    FROZEN = "frozen"
    CUT_OFF = "cut off"
    IDLE = "idle"
    BUSY = "busy"
    GPU_FAILED = "gpu failed"
    GPU_HANGS = "gpu hangs"
    GPU_BEHIND = "gpu behind"
    OTHER_DIGEST = "other digest"
    DAMAGED = "damaged"
    SPOILT = "spoilt"
    MISCOMPUTED = "miscomputed"
    STRAGGLERS = "stragglers"
    REPLACED = "replaced"
    WENT_BACK = "went back"
    NOT_WENT_BACK = "not went back"
    NO_INIT = "no init"
    NOT_READY = "not ready"
    # Reasons for releasing a worker, or for killing one that did not leave.
    HOST_NOT_LISTED = "host not listed"
    HOST_LEAVES = "host leaves"
    RETURNED_BEFORE = "returned before"
    JOB_ENDED = "job ended"
    JOB_OVER = "job over"
    GONE_ON_WITHOUT = "gone on without"
    NOT_LEFT = "not left"
    REJECTED = "rejected"
    SCALED_DOWN = "scaled down"
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    REMOVED = "removed"
    CONNECTION_LOST = "connection lost"
    NOT_BACK = "not back"
    STRANDED = "stranded"
    RAISED = "raised"
    NOT_EXITED = "not exited"
    CANT_BE_KILLED = "can't be killed"
    SLOT_COOLS = "slot cools"
    SLOT_GIVEN_UP = "slot given up"
    UNHEALTHY = "unhealthy"
    # Answers to an accepted operator request.
    SCALED = "scaled"
    DRAINS = "drains"
    DRAINS_NO_MORE = "drains no more"
    REMOVES = "removes"
    # Answers to a refused operator request.
    FIXED_SIZE = "fixed size"
    BELOW_LEAST = "below least"
    NO_SUCH_HOST = "no such host"
    NO_SUCH_WORKER = "no such worker"
    NOWHERE_ELSE = "nowhere else"
    LEAVES_ALREADY = "leaves already"
    # Reasons for the end of a world, which are also the reasons for the next world.
    INIT_AGAIN = "init again"
    ENTERING = "entering"
    FELL_OUT = "fell out"
    COLLECTIVE_BROKE = "collective broke"
    LOST_EXITED = "lost, exited"
    LOST_KILLED = "lost, killed"
    LOST_ALIVE = "lost, alive"
    LOST_STRANDED = "lost, stranded"
    LOST_RAISED = "lost, raised"
    LOST_QUIT = "lost, quit"
    LOST_REJECTED = "lost, rejected"
    LOST_HOST = "lost host"
    HOST_SILENT = "host silent"
    LOST_WITH_HOST = "lost with host"
    NOT_STOPPED = "not stopped"
    NETWORK_HANGS = "network hangs"
    GPUS_HANG = "gpus hang"
    DIFFERENT_COLLECTIVES = "different collectives"
    COMMIT_ON_SOME_RANKS = "commit on some ranks"
    SEVERAL = "several"
    FROM_CHECKPOINT = "from checkpoint"
    NO_RESUME = "no resume"
    SHARDS_LOST = "shards lost"
    SCRIPT_REFUSED = "script refused"
    FIRST_WORLD = "first world"
    NEXT_WORLD = "next world"
    # Reasons for a planned change of the world, and for cancelling one.
    JOINED = "joined"
    LEAVES = "leaves"
    AWAITS_COMMIT = "awaits commit"
    NOT_WANTED = "not wanted"
    NO_ANSWER = "no answer"
    RETURNED = "returned"
    RETURNED_MEANWHILE = "returned meanwhile"
    RECONNECTED = "reconnected"
    # Reasons for the end of a job that succeeded.
    ALL_RETURNED = "all returned"
    ALL_EXITED = "all exited"
    NO_TRAINING = "no training"
    AWAITS_INIT = "awaits init"
    # Reasons for the end of a job that succeeded, although the script failed on some workers or after training.
    FAILED_AFTER_TRAINING = "failed after training"
    FAILED_IN_TRAINING = "failed in training"
    FEWER_RETURNED = "fewer returned"
    # Reasons for the end of a job in which no workers are left to continue.
    ALL_LOST = "all lost"
    NO_COMMIT = "no commit"
    SLOTS_SPENT = "slots spent"
    TOO_FEW_SLOTS = "too few slots"
    TOO_FEW = "too few"
    TOO_FEW_HEALTHY = "too few healthy"
    OTHERS_EXITED = "others exited"
    # Reasons for the end of a job that would make no further progress.
    RESET_LIMIT = "reset limit"
    RESTARTS_SPENT = "restarts spent"
    MACHINE_LEAVES = "machine leaves"
    STOPPED = "stopped"
    STUCK_AGAIN = "stuck again"
    IN_CIRCLES = "in circles"
    # Reasons for the end of a job because of a worker or the script.
    LOST_PEER = "lost peer"
    LOST_PEER_OUTSIDE = "lost peer outside"
    CALLS_DIFFER = "calls differ"
    SAME_CALLS = "same calls"
    TENSORS_DIFFER = "tensors differ"
    LAYOUTS_DIFFER = "layouts differ"
    ENDED_EARLY = "ended early"
    ENDED = "ended"
    SCRIPT_FAILS = "script fails"
    SCRIPT_RAISED = "script raised"
    SAME_EXCEPTION = "same exception"
    NOT_ENTERED = "not entered"
    LOST_FOR_GOOD = "lost for good"
    UNEVEN = "uneven"
    RETURNED_ALONE = "returned alone"
    JOURNAL_INCOMPLETE = "journal incomplete"
    # Reasons that concern the driver itself.
    STORE_SILENT = "store silent"
    STORE_BACK = "store back"
    DRIVER_BUG = "driver bug"


# typing.List: Python 3.10 does not resolve the forward reference in list["Reason"].
Fact = Union[str, bool, int, float, None, "Reason", List["Reason"]]  # noqa: UP006


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reason for a decision: its kind, and the ``facts`` for its sentence.

    In facts, workers have the form ``h:2#1``, and times are in seconds.
    """

    kind: ReasonKind
    facts: dict[str, Fact] = {}

    def __str__(self) -> str:
        return "".join(_parts(self))


def because(kind: ReasonKind, **facts: Fact) -> Reason:
    """Create a reason of this kind with these facts."""
    return Reason(kind, facts)


def as_sentence(text: str) -> Reason:
    """Create a reason whose sentence is a text from outside the driver."""
    return Reason(ReasonKind.TOLD, {"text": text})


def brief(reason: Reason | None) -> str:
    """Return the beginning of a reason's sentence, without details.

    For example ``it is frozen`` for ``it is frozen (stopped by a signal)``.
    """
    if reason is None:
        return ""
    return _parts(reason)[0]


def in_one_line(reason: Reason) -> str:
    """Return the first line of a reason's sentence, and the most informative line of the worker's output.

    The latter is the line with the worker's uncaught exception or, if there is none, the last line. It is empty if the
    sentence has only one line.
    """
    lines = str(reason).rstrip().splitlines()
    if len(lines) < 2:
        return ""
    wrote, trace = reason.facts.get("wrote"), reason.facts.get("trace")
    last = lines[-1].strip()
    if wrote:
        without = msgspec.structs.replace(reason, facts={**reason.facts, "wrote": ""})
        lines[0] = str(without).splitlines()[0]
    if reason.kind is ReasonKind.SCRIPT_RAISED:
        return lines[0].rstrip(":")  # the sentence already contains the summary
    if not reason.facts.get("caught"):
        last = exception_line(str(wrote or trace or "")) or shortened(last)
    return f"{lines[0].rstrip(':')}: {last}"


def counted(number: int, noun: str) -> str:
    """Format a number and a noun, in the plural if necessary: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def start_checkpoint(facts: Mapping[str, Any]) -> str:
    """Describe a checkpoint, for example ``step 300, checkpoint r0001-g0002-c00000300 in /checkpoints``.

    See `StartCheckpoint`.
    """
    step = "" if facts["step"] is None else f"step {facts['step']}, "
    return f"{step}checkpoint {facts['name']} in {facts['place']}"


def commit_id(fact: object) -> str:
    """Return the commit ID ``g2c300`` for the text ``2.300`` in a journal. Return any other text unchanged."""
    generation, _, number = str(fact).partition(".")
    if generation.isdecimal() and number.isdecimal():
        return str(Commit(int(generation), int(number)))
    return str(fact)


# ---- sentences -----------------------------------------------------------------------------------------------------


class _FactFormatter(string.Formatter):
    """Formatter for the templates of sentences, with five additional format specifiers.

    ``{n:+worker}`` inserts a number and its noun, ``{x:brief}`` the beginning of a reason's sentence, ``{x:wrote}`` the
    last output of a worker, ``{x:because}`` the reason why the worker was killed, if it was, and ``{x:commit}`` a
    commit ID.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("+"):
            return counted(value, format_spec[1:])
        if format_spec == "brief":
            return brief(value)
        if format_spec == "commit":
            return commit_id(value)
        if format_spec == "because":
            return f", killed because {value}" if value else ""
        if format_spec == "wrote":
            return f"; it wrote:\n{value}" if value else ""
        return format(value if value is not None else "", format_spec)


Sentence = str | tuple[str, str] | Callable[[Mapping[str, Any]], str]
_formatter = _FactFormatter()


def _parts(reason: Reason) -> Sequence[str]:
    sentence = SENTENCES[reason.kind]
    try:
        if callable(sentence):
            return (sentence(reason.facts),)
        parts = sentence if isinstance(sentence, tuple) else (sentence,)
        return [_formatter.vformat(part, (), reason.facts) for part in parts]
    except (LookupError, TypeError, ValueError):
        return (f"{reason.kind.value}: {reason.facts}",)


def _lost_peer_outside(facts: Mapping[str, Any]) -> str:
    began = facts.get("began", True)
    where = "outside elastic.run" if began else "before elastic.run began"
    template = (
        f"{{who}} lost a peer {where} and can't recover ({{text}}). {ADVICE if began else BEFORE}"
    )
    return _formatter.vformat(template, (), facts)


def _several(facts: Mapping[str, Any]) -> str:
    clauses: dict[str, Any] = {}
    for cause in facts["causes"]:
        same = str(cause)
        if isinstance(cause, Reason) and cause.kind is ReasonKind.LOST_EXITED:
            same = f"exit: {cause.facts['exit']}"
            if same in clauses:
                workers = f"{clauses[same].facts['worker']}, {cause.facts['worker']}"
                cause = because(cause.kind, worker=workers, exit=cause.facts["exit"])
        clauses[same] = cause
    more = [f"and {facts['more']} more"] if facts.get("more") else []
    return "; ".join([*map(str, clauses.values()), *more])


def _next_world(facts: Mapping[str, Any]) -> str:
    ready = f"{facts['ready']} of {facts['members']} stayed"
    new = f", {facts['new']} joined" if facts["new"] else ""
    return f"{facts['cause']}; {ready}{new}"


def _hang(begin: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that describes a hang for which no worker is blamed.

    ``begin`` is the beginning of the sentence. The facts contain ``before``, the number of worlds that have hung since
    the last new commit.
    """

    def sentence(facts: Mapping[str, Any]) -> str:
        before = facts["before"]
        again = f" (hang {before + 1} since the last new commit)" if before else ""
        end = "no single worker is at fault, so no worker is killed, and all workers form a new communicator"
        return f"{_formatter.vformat(begin, (), facts)}{again}; {end}"

    return sentence


def _ended(facts: Mapping[str, Any]) -> str:
    """Describe the exit of a worker that ends the job."""
    text = _formatter.vformat("{who} ended with {exit}{killed_for:because}", (), facts)
    early = " too early" if facts.get("early") else ""
    outside = ""
    if facts.get("outside"):
        outside = f" while others were outside elastic.run. {ADVICE}"
        if not facts.get("began", True):
            outside = f" before elastic.run began. {BEFORE}"
    return f"{text}{early}{outside}{_formatter.format_field(facts.get('wrote'), 'wrote')}"


def _layouts_differ(facts: Mapping[str, Any]) -> str:
    """Describe the rejection of a worker whose state differs.

    Args:
        facts: mapping with ``worker``, the rejected worker, and ``first``, a worker that was rejected earlier for the
            same state, or None if shards were lost with ``worker``.
    """
    again = ", like that of {first} earlier" if facts["first"] else ", and its shards are lost"
    template = "the state of {worker} differs from that of {rank_0}" + again
    build = "build the same model, optimizer and state on every rank"
    return f"{_formatter.vformat(template, (), facts)}: {build}"


def _all_returned(facts: Mapping[str, Any]) -> str:
    """Describe the end of a job that finished successfully.

    Args:
        facts: mapping with ``members`` and ``generation`` of the last world. If scripts failed, it also contains
            ``failed``, the texts of the failures, and ``began``, the number of workers that started.
    """
    if not facts.get("failed"):
        return f"all {counted(facts['members'], 'member')} of generation {facts['generation']} returned"
    why = "; ".join(map(str, facts["failed"]))
    began = counted(facts["began"], "worker")
    return f"finished on {facts['members']} of the {began} that started; {why}"


def _went_back(facts: Mapping[str, Any]) -> str:
    text = f"training is repeated from step {facts['step']}, since {facts['worker']} may have computed wrong gradients"
    if facts["whole"]:
        return f"{text} since that step"
    return f"{text}; earlier steps may contain its gradients too, but no older commit is left"


def _scaled(facts: Mapping[str, Any]) -> str:
    """Describe the effect of a request to scale the job.

    Args:
        facts: mapping with ``before``, the previous number of workers, or None if only the number of slots limited
            it.
    """
    wanted, before, slots = facts["workers"], facts["before"], facts["slots"]
    was = "one per slot" if before is None else str(before)
    text = f"scaled from {was} to {counted(wanted, 'worker')}"
    if facts["leave"]:
        return f"{text}: {facts['leave']} of them {'leaves' if facts['leave'] == 1 else 'leave'} at the next commit"
    if slots < wanted:
        text = f"{text}, but {_only_slots(slots)}"
        if facts.get("drained"):
            more = f" and {facts['more']} more" if facts.get("more") else ""
            first = str(facts["drained"]).partition(",")[0]
            several = more or "," in str(facts["drained"])
            return (
                f"{text}: {facts['drained']}{more} {'are' if several else 'is'} drained;"
                f" undo with: elasticrun drain {first} --off"
            )
        return f"{text}; more workers start when slots become available"
    return text


def _unhealthy(facts: Mapping[str, Any]) -> str:
    """Describe a failed health check.

    Args:
        facts: mapping with ``outcome``, a value of `HealthOutcome`, and ``code``, the exit code or None.
    """
    how = {
        "timed_out": "timed out",
        "wrong_result": "computed a wrong result",
        "low_bandwidth": "measured low bandwidth",
    }
    text = how.get(str(facts["outcome"]), "failed")
    if facts["outcome"] == "failed" and facts["code"] is not None:
        text = f"{text} with exit code {facts['code']}"
    return f"health check of {facts['slot']} {text}" + (
        f": {facts['line']}" if facts["line"] else ""
    )


def describe_bandwidth(facts: Mapping[str, Any]) -> str:
    """Describe the bandwidth of a host that is far below that of the others.

    Args:
        facts: mapping with ``direction`` ("sent" or "received"), ``peer``, ``bytes_s``, ``median_bytes_s`` and
            ``others``.
    """
    way = "sends {} to" if facts["direction"] == "sent" else "receives {} from"
    rate, median = (f"{facts[name] / 1e6:.3g} MB/s" for name in ("bytes_s", "median_bytes_s"))
    others = counted(facts["others"], "other host")
    return f"it {way.format(rate)} {facts['peer']}, while the median of {others} is {median}"


def _only_slots(slots: int) -> str:
    return (
        "no slot is available"
        if not slots
        else f"only {counted(slots, 'slot')} {'is' if slots == 1 else 'are'} available"
    )


def _too_few_slots(facts: Mapping[str, Any]) -> str:
    """Describe a shortage of slots.

    Args:
        facts: mapping with ``usable``, the number of slots that run a worker or can run one, and ``given_up``, the
            names of the first slots that were given up.
    """
    more = f" and {facts['more']} more" if facts["more"] else ""
    begin = "{needed:+worker} needed, but {slots}: {given_up}{more} excluded after {attempts:+attempt} without progress"
    facts = {**facts, "slots": _only_slots(facts["usable"]), "more": more}
    return _formatter.vformat(f"{begin}, and the list of hosts is fixed{{wrote:wrote}}", (), facts)


def _first_world(facts: Mapping[str, Any]) -> str:
    """Describe the start of the first world.

    Args:
        facts: mapping with ``wanted``, the value of -np, if fewer workers are ready.
    """
    members, wanted = facts["members"], facts.get("wanted")
    if wanted is None:
        return f"{'it' if members == 1 else 'all'} called init()"
    slots = facts["slots"]
    why = f"{_only_slots(slots)}; the remaining workers join when slots become available"
    if slots > members:
        why = "the remaining workers join when they are ready"
    return f"starting with {members} of {counted(wanted, 'worker')}: {why}"


def _nowhere_else(facts: Mapping[str, Any]) -> str:
    """Describe why a drain was refused: the other hosts of a fixed list have too few slots for ``least`` workers."""
    if not facts["slots"]:
        return f"{facts['host']} is the only usable host; to end the job: elasticrun stop"
    others = counted(facts["slots"], "slot")
    return f"{facts['host']} is needed: other hosts have {others}, and --min-np is {facts['least']}"


def _drains(facts: Mapping[str, Any]) -> str:
    host, workers, least = facts["host"], facts["workers"], facts["least"]
    if not workers:
        return f"drained {host}: no worker runs there"
    verb = "leaves" if workers == 1 else "leave"
    when = "at the next commit"
    if least:  # The workers on this host are needed for --min-np.
        when = f"once {least} {'runs' if least == 1 else 'run'} elsewhere"
    return f"drained {host}: its {counted(workers, 'worker')} {verb} {when}"


def _script_fails(facts: Mapping[str, Any]) -> str:
    """Describe the end of a job in which every worker fails early.

    In older journals, the fact ``worker``, the last failed worker, is missing.
    """
    last = f"the last, {facts['worker']}," if "worker" in facts else "the last"
    text = f"every worker ended before training began, {last} with {{exit}}{{killed_for:because}}{{wrote:wrote}}"
    return _formatter.vformat(text, (), facts)


def _machine_leaves(facts: Mapping[str, Any]) -> str:
    """Describe the end of a job because the machines of the driver and of all workers are reclaimed."""
    text = f"this machine will be reclaimed ({facts['notice']})"
    if facts["newest"]:
        return f"{text}; commit {commit_id(facts['newest'])} is durable: rerun the same command to resume from it"
    if facts["durable"]:
        return f"{text}; no commit of this run became durable in time"
    return f"{text}; to resume after that, use --checkpoint-dir"


def _stopped(facts: Mapping[str, Any]) -> str:
    """Describe the end of a job that an operator or a batch system requested."""
    text = f"{facts['why']}"
    if not facts["made"]:
        text += f"; no final checkpoint was written within {facts['within_s']:g} s"
    if not facts["newest"]:
        return text
    return f"{text}; commit {commit_id(facts['newest'])} is durable: rerun the same command to resume from it"


def _awaits_commit(facts: Mapping[str, Any]) -> str:
    """Describe how long workers have waited for the members' next commit, at which workers join and leave."""
    text = f"{waiting_workers(facts)}: the training workers have not reached a commit for {facts['for_s']:.0f} s"
    if facts.get("within_s") is None:
        return text
    return f"{text}; without one within {facts['within_s']:.0f} s, training restarts from the last commit"


def _awaits_init(facts: Mapping[str, Any]) -> str:
    """Describe the wait for workers that have not called init()."""
    have = "has" if facts["late"] == 1 else "have"
    late = f"{facts['late']} of {counted(facts['workers'], 'worker')} {have}"
    text = f"{late} not called init() for {facts['for_s']:.0f} s"
    if facts["late"] < facts["workers"]:
        return f"{text}, and the other workers wait"
    if facts.get("importing"):
        return f"{text}: they may still be importing modules or loading data"
    return (
        f"{text}: without it, each worker trains alone; call hvd.init(), and train in a function under @elastic.run"
        " (elasticrun docs migration)"
    )


def _slot_cools(facts: Mapping[str, Any]) -> str:
    """Describe the exit of a worker whose slot will be used again after a cooldown.

    Args:
        facts: mapping. If the worker had not entered elastic.run, it contains ``what``, the worker's exception or an
            empty string.
    """
    text = f"{facts['worker']} ended with {facts['exit']}"
    if "what" in facts:
        text += " before it trained" + (f": {facts['what']}" if facts["what"] else "")
    return f"{text}; its slot is free in {facts['wait_s']:g} s"


def _not_left(facts: Mapping[str, Any]) -> str:
    """Describe the failure of a removed worker to exit in time. In older journals, ``within_s`` is missing."""
    within = f"within {facts['within_s']:g} s" if "within_s" in facts else "in time"
    return f"it did not exit {within} after it was removed"


def waiting_workers(facts: Mapping[str, Any], *, past: bool = False) -> str:
    """Describe the numbers of workers that wait to join and to leave, for example ``2 workers wait to join``."""
    texts = [
        f"{counted(facts[name], 'worker')} {'waited' if past else 'waits' if facts[name] == 1 else 'wait'} to {verb}"
        for name, verb in (("joining", "join"), ("leaving", "leave"))
        if facts[name]
    ]
    return " and ".join(texts)


SENTENCES: dict[ReasonKind, Sentence] = {
    ReasonKind.TOLD: "{text}",
    ReasonKind.FIRST_START: "first start",
    ReasonKind.SLOT_IS_FREE: "its slot is free again",
    ReasonKind.TO_STAND_BY: "it replaces the next lost worker as a standby",
    ReasonKind.FROZEN: ("it is frozen", " ({how})"),
    ReasonKind.CUT_OFF: ("it is cut off", ": its host stopped acknowledging packets"),
    ReasonKind.IDLE: ("it is stuck", ": idle for {for_s:.0f} s while the others waited {where}"),
    ReasonKind.BUSY: (
        "it is stuck",
        ": busy for {for_s:.0f} s ({rates}) while the others waited {where}",
    ),
    ReasonKind.GPU_FAILED: (
        "its GPU failed",
        ": its CUDA calls have failed for {for_s:.0f} s while all ranks wait in collective {number} of {group!r}",
    ),
    ReasonKind.GPU_HANGS: (
        "its GPU hangs",
        ": it launched collective {number} of {group!r} but has not reached it {for_s:.0f} s after the other GPUs",
    ),
    ReasonKind.GPU_BEHIND: (
        "its GPU hangs",
        ": it has not finished collective {number} of {group!r} {for_s:.0f} s after the other GPUs, for the"
        " second time",
    ),
    ReasonKind.OTHER_DIGEST: "its parameters differ from those of {right} at commit {commit:commit}",
    ReasonKind.DAMAGED: "its {parts} at commit {commit:commit} differs from that of {equal} others, but was equal"
    " earlier: test its host, whose memory or processor corrupted data",
    ReasonKind.SPOILT: "infinite or NaN gradients, caused by corrupted memory of one worker, have corrupted all"
    " replicas and commit {commit:commit}",
    ReasonKind.MISCOMPUTED: (
        "it computed wrong gradients",
        " of shard {shard} in step {step}: checksum {digest}, but {right} on {witnesses}",
    ),
    ReasonKind.STRAGGLERS: "stragglers: {workers}",
    ReasonKind.REPLACED: "its speed was {speed:.2f} times the median of the others",
    ReasonKind.WENT_BACK: _went_back,
    ReasonKind.NOT_WENT_BACK: "weights may contain wrong gradients of {worker}: no older commit is left; to remove"
    " them, restart from an older checkpoint (elasticrun --from)",
    ReasonKind.NO_INIT: "it did not call init() within {within_s:g} s",
    ReasonKind.NOT_READY: "it did not become ready within {within_s:g} s",
    ReasonKind.HOST_NOT_LISTED: "{host} left the list of hosts",
    ReasonKind.HOST_LEAVES: "{host} will be reclaimed: {notice}",
    ReasonKind.RETURNED_BEFORE: "it already returned from elastic.run, which a job runs once",
    ReasonKind.JOB_ENDED: "the job has ended",
    ReasonKind.JOB_OVER: "the outcome of the job is decided",
    ReasonKind.GONE_ON_WITHOUT: "the job continued without it",
    ReasonKind.NOT_LEFT: _not_left,
    ReasonKind.REJECTED: "it was rejected",
    ReasonKind.SCALED_DOWN: "scaled down to {workers:+worker}",
    ReasonKind.DRAINED: "{host} is drained",
    ReasonKind.QUARANTINED: "{place} is quarantined, because {worker} computed wrong gradients there",
    ReasonKind.REMOVED: "an operator removed it",
    ReasonKind.SCALED: _scaled,
    ReasonKind.DRAINS: _drains,
    ReasonKind.DRAINS_NO_MORE: "{host} is no longer drained: workers may start there again",
    ReasonKind.REMOVES: "{worker} leaves at its next commit",
    ReasonKind.FIXED_SIZE: "this job has a fixed size: start it with --min-np or --max-np to change the size while it"
    " runs",
    ReasonKind.BELOW_LEAST: "{workers:+worker} requested, but --min-np is {least}: request at least {least}",
    ReasonKind.NO_SUCH_HOST: "{host} is not a host of this job: pass one of {hosts}",
    ReasonKind.NOWHERE_ELSE: _nowhere_else,
    ReasonKind.NO_SUCH_WORKER: "{worker} is not a running worker: see elasticrun status",
    ReasonKind.LEAVES_ALREADY: "{worker} is already leaving: {leaving}",
    ReasonKind.CONNECTION_LOST: "its connection was lost",
    ReasonKind.NOT_BACK: "it did not reconnect to the restarted driver",
    ReasonKind.STRANDED: "it lost a peer outside elastic.run",
    ReasonKind.RAISED: "it raised an exception",
    ReasonKind.NOT_EXITED: "it did not exit in time",
    ReasonKind.CANT_BE_KILLED: "{worker} could not be killed within {within_s:g} s: continuing without it",
    ReasonKind.SLOT_COOLS: _slot_cools,
    ReasonKind.SLOT_GIVEN_UP: "stopped using slot {slot}: {attempts} consecutive workers ended without progress, the"
    " last with {exit}{wrote:wrote}",
    ReasonKind.INIT_AGAIN: "init() was called again",
    ReasonKind.ENTERING: "training begins in elastic.run",
    ReasonKind.FELL_OUT: "{worker} rejoined without reporting a failure",
    ReasonKind.COLLECTIVE_BROKE: "a collective failed at {worker}: {text}",
    ReasonKind.LOST_EXITED: "lost {worker} ({exit})",
    ReasonKind.LOST_KILLED: "lost {worker} (killed: {killed_for:brief})",
    ReasonKind.LOST_ALIVE: "lost {worker}, which could not be killed ({killed_for:brief})",
    ReasonKind.LOST_STRANDED: "{worker} lost a peer outside elastic.run",
    ReasonKind.LOST_RAISED: "{worker} raised {summary}",
    ReasonKind.LOST_QUIT: "{worker} called {call}",
    ReasonKind.LOST_REJECTED: "the state of {worker} differs from that of the other workers",
    ReasonKind.LOST_HOST: ("lost host {host}", ": {text}"),
    ReasonKind.HOST_SILENT: "its agent is connected but has not responded for {for_s:.1f} s while all others wait for"
    " its workers: the host is stopped or unreachable",
    ReasonKind.LOST_WITH_HOST: ("lost host {host}", ": {text} ({workers:+worker})"),
    ReasonKind.NOT_STOPPED: "{workers} did not reach safepoint {check} within {within_s:g} s",
    ReasonKind.NETWORK_HANGS: _hang(
        "all GPUs have reached collective {number} of {group!r}, and it has not ended for {for_s:.0f} s: NCCL or"
        " the network hangs"
    ),
    ReasonKind.GPUS_HANG: _hang(
        "all ranks have launched collective {number} of {group!r}, and most GPUs have not reached it for"
        " {for_s:.0f} s"
    ),
    ReasonKind.DIFFERENT_COLLECTIVES: (
        "all members have waited for {for_s:g} s in different collectives, so none can complete: {where}; make the"
        " same calls on all ranks"
    ),
    ReasonKind.COMMIT_ON_SOME_RANKS: (
        "all members have waited for {for_s:g} s in different collectives: {where}; commit() of a sharded state is a"
        " collective, so call it on all ranks, the same number of times"
    ),
    ReasonKind.SEVERAL: _several,
    ReasonKind.FIRST_WORLD: _first_world,
    ReasonKind.NEXT_WORLD: _next_world,
    ReasonKind.JOINED: "{workers} joined",
    ReasonKind.LEAVES: "{worker} leaves ({leaving})",
    ReasonKind.AWAITS_COMMIT: _awaits_commit,
    ReasonKind.NOT_WANTED: "no worker is waiting to join or leave",
    ReasonKind.NO_ANSWER: "no answer from {workers}",
    ReasonKind.RETURNED: "{worker} returned",
    ReasonKind.RETURNED_MEANWHILE: "{worker} returned during a planned change",
    ReasonKind.RECONNECTED: "reconnected",
    ReasonKind.FROM_CHECKPOINT: "no worker holds a commit in memory; resuming from the newest checkpoint (restart"
    " {restart} of {limit} since the last one): {cause}",
    ReasonKind.ALL_RETURNED: _all_returned,
    ReasonKind.FAILED_AFTER_TRAINING: "training succeeded, but {who} ended with {exit} in code that runs after it: the"
    " job fails with exit code 1",
    ReasonKind.FAILED_IN_TRAINING: "{cause} in its training function, after all others had returned: the job fails"
    " with exit"
    " code 1",
    ReasonKind.FEWER_RETURNED: "--strict: scripts failed, so the job fails with exit code 1",
    ReasonKind.NO_TRAINING: "--strict: {workers:+worker} ended with exit code 0, and none called init(), so no training"
    " took place",
    ReasonKind.AWAITS_INIT: _awaits_init,
    ReasonKind.ALL_EXITED: "{workers:+worker} ended with exit code 0",
    ReasonKind.ALL_LOST: f"all {{members:+member}} of generation {{generation}} are lost, and no commit is left:"
    f" {{cause}}. {GONE}{{wrote:wrote}}",
    ReasonKind.NO_COMMIT: "no survivor holds a commit to restore: {cause}",
    ReasonKind.SLOTS_SPENT: "every slot was excluded after {attempts:+attempt}, but {needed:+worker} are"
    " needed{wrote:wrote}",
    ReasonKind.TOO_FEW_SLOTS: _too_few_slots,
    ReasonKind.TOO_FEW: "only {ready} of {needed:+worker} ready after {within_s:g} s: start more hosts, lower --min-np,"
    " or raise --elastic-timeout",
    ReasonKind.TOO_FEW_HEALTHY: "too few healthy slots, because health checks failed on {slots}: {cause}",
    ReasonKind.UNHEALTHY: _unhealthy,
    ReasonKind.OTHERS_EXITED: "{exited:+worker} ended with exit code 0 while {waiting:+other} waited in init(): call"
    " init() on every worker",
    ReasonKind.NO_RESUME: "training can't resume from the checkpoint: {text}",
    ReasonKind.SHARDS_LOST: "{text}",
    ReasonKind.SCRIPT_REFUSED: "--strict: {text}",
    ReasonKind.RESTARTS_SPENT: "{cause}; the limit --restarts {limit} is reached without a new checkpoint",
    ReasonKind.MACHINE_LEAVES: _machine_leaves,
    ReasonKind.STOPPED: _stopped,
    ReasonKind.RESET_LIMIT: "{cause}; the limit --reset-limit {limit} is reached",
    ReasonKind.STUCK_AGAIN: "a worker was stuck in {worlds} consecutive worlds without a new commit: {cause}",
    ReasonKind.IN_CIRCLES: "{worlds} consecutive recoveries without a lost worker and without a new commit: {cause}",
    ReasonKind.LOST_PEER: "{who} lost a peer: {text}",
    ReasonKind.CALLS_DIFFER: "{text}",
    ReasonKind.SAME_CALLS: "after the commit was restored, the next world failed in the same way: {cause}",
    ReasonKind.TENSORS_DIFFER: "{summary}",
    ReasonKind.LAYOUTS_DIFFER: _layouts_differ,
    ReasonKind.LOST_PEER_OUTSIDE: _lost_peer_outside,
    ReasonKind.ENDED_EARLY: "{workers} ended with exit code 0 too early: {cause}",
    ReasonKind.ENDED: _ended,
    ReasonKind.SCRIPT_FAILS: _script_fails,
    ReasonKind.SCRIPT_RAISED: "{who} raised {summary}:\n{trace}",
    ReasonKind.SAME_EXCEPTION: "{first} and {worker} raised the same exception at commit {commit:commit}:\n{trace}",
    ReasonKind.NOT_ENTERED: "{who} has not called init() again for {for_s:g} s while others wait for it",
    ReasonKind.LOST_FOR_GOOD: "{who} is lost: {cause}",
    ReasonKind.UNEVEN: "{where} for {for_s:g} s; all ranks must make the same calls; if some have fewer batches,"
    " end with hvd.join()",
    ReasonKind.RETURNED_ALONE: "{who} returned from elastic.run at least {for_s:g} s ago while {where}: all ranks must"
    " make the same calls",
    ReasonKind.STORE_SILENT: "etcd at {store} does not respond ({text}); training continues, and membership changes"
    " are postponed",
    ReasonKind.STORE_BACK: "etcd at {store} responds again after {silent_s:.1f} s",
    ReasonKind.JOURNAL_INCOMPLETE: "{worker} is in generation {generation}, which is missing from the journal of"
    " this driver: the journal is incomplete, so start a new job with --fresh",
    ReasonKind.DRIVER_BUG: "a bug in the driver (please report it with the journal): {error}",
}
