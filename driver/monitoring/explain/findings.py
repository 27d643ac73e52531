"""Findings about a job as data: outcome, cause, course of events, cost, and advice. Pure: no I/O, no clock.

`sentences` expresses the findings in words.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.driver.events import DrainRequested, Event, RemoveRequested, ScaleRequested
from elastic.driver.monitoring.explain.job_history import Incident, JobHistory, StoreOutage
from elastic.driver.monitoring.explain.loss_causes import FOLLOWS, Cause, Death
from elastic.driver.monitoring.late_islands import LateIslands
from elastic.driver.monitoring.shard_status import recovery_facts
from elastic.driver.monitoring.stalls import Stall, StallEnd, blamed
from elastic.driver.monitoring.time_accounting import PARTS, STRETCHES
from elastic.driver.reasons import Reason, ReasonKind
from elastic.driver.settings import Settings

# numbers of incidents at the beginning and at the end that are described individually
FIRST, LAST = 12, 12
MUCH_LOST = 0.1  # minimum fraction of lost worker time that is reported
# Commit interval, in seconds, below which more frequent commits would not noticeably reduce lost work.
OFTEN_S = 1.0
# kind of mistake, as named by the script checks, for a script that makes no commits
NO_COMMIT = "no-commit"
MUCH_JOINING = 0.3
MUCH_STALLED_S = 30.0
# minimum duration of a straggler's slow periods for which advice is given, in seconds
MUCH_SLOW_S = 60.0
# Causes during which the other workers waited, so that time was lost.
STALLS = (Cause.STUCK, Cause.FROZEN, Cause.CUT_OFF, Cause.HOST_LOST, Cause.GPU_HANGS)
OF_THE_SCRIPT = (Cause.EXCEPTION, Cause.MISMATCH, Cause.STATE_MISMATCH, Cause.MISSING_MODULE)
NAMED_SLOTS = 8
NAMED_ISLANDS = 8  # maximum number of late islands that are named
REPEATS = 3  # minimum number of losses with the same cause that count as recurring


class FindingKind(enum.Enum):
    """Kind of a finding. The order of the members is the order of display."""

    # Findings about the outcome of the job.
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    RUNS = "runs"
    STALLS_NOW = "stalls now"
    CHANGE_WAITS_NOW = "change waits now"
    CUT_OFF = "cut off"
    NOTHING_HAPPENED = "nothing happened"
    # Findings about the cause of a failure: the first loss, and why the job ended.
    CAUSE = "cause"
    CAUSE_UNKNOWN = "cause unknown"
    DRIVER_BUG = "driver bug"
    STORE_AWAY = "store away"
    AFTER_TRAINING = "after training"
    THEN = "then"  # the driver's reason for ending the job
    NOT_ELASTIC = "not elastic"
    REPEATED = "repeated"  # several losses had the same cause
    TRACE = "trace"
    # Findings about the course of events.
    RESUMED_FROM = "resumed from"  # the checkpoint from which the job began
    TRAINING_BEGAN = "training began"
    NEVER_TRAINED = "never trained"
    INCIDENT = "incident"
    SHARDED = "sharded"
    ISLANDS = "islands"  # merges of elastic.DiLoCo, and its late islands
    UNHEALTHY = "unhealthy"  # slots that failed health checks
    SLOW = "slow"  # a straggler
    MORE_SLOW = "more slow"
    STALL = "stall"
    MORE_STALLS = "more stalls"
    # workers waited to join or leave, because the members made no commit
    CHANGE_WAIT = "change wait"
    MORE_CHANGE_WAITS = "more change waits"
    MORE_INCIDENTS = "more incidents"
    REQUEST = "request"  # an operator's request
    OVERDUE = "overdue"  # a worker was removed but did not exit, so it was killed
    PLANNED = "planned changes"
    CHECKPOINTS = "checkpoints"  # number of checkpoints, and the newest one
    DRIVERS = "drivers"
    STORE_SILENT = "store silent"
    MORE_SILENCES = "more silences"
    # Findings about lost work.
    LOST_NOTHING = "lost nothing"
    LOST_STEPS = "lost steps"
    LOST_COMMITS = "lost commits"
    LOST_ALL = "lost all"
    NOT_DURABLE = "not durable"
    # Findings about lost time.
    RECOVERIES = "recoveries"
    TIME = "time"
    # Advice to the user.
    ADVICE = "advice"
    # Findings about the journal file.
    LINES_LEFT_OUT = "lines left out"
    FROM_THE_MIDDLE = "from the middle"
    NOT_WRITTEN_ON = "not written on"


class Advice(enum.Enum):
    """Advice that can be given to the user about a job."""

    MORE_MEMORY = "more memory"
    LESS_GPU_MEMORY = "less gpu memory"
    FREE_DISK = "free disk"
    SAME_CALLS = "same calls"
    SAME_STATE = "same state"
    MEND_SCRIPT = "mend script"
    INSTALL = "install"
    MEND_START = "mend start"
    TEST_GPU = "test gpu"
    TEST_HOST = "test host"
    TEST_HOSTS = "test hosts"
    UNHEALTHY_HOST = "unhealthy host"
    LOOK_AT_LINE = "look at line"
    LOOK_AT_STACKS = "look at stacks"
    WHO_FROZE_IT = "who froze it"
    LOOK_AT_NETWORK = "look at network"
    LOOK_AT_SPEED = "look at speed"
    WHO_KILLED_IT = "who killed it"
    CRASH = "crash"
    SHARED_MEMORY = "shared memory"
    LOOK_AT_HOST = "look at host"
    START_TIMEOUT = "start timeout"
    CALL_INIT = "call init"
    BE_ELASTIC = "be elastic"
    FEWER_NEEDED = "fewer needed"
    RESET_LIMIT = "reset limit"
    CHECKPOINTS = "checkpoints"
    MORE_COPIES = "more copies"
    SCRIPT_CHECK = "script check"  # a mistake in the script that the script checks found
    CALL_COMMIT = "call commit"
    COMMIT_MORE_OFTEN = "commit more often"
    PRELOAD = "preload"
    STANDBYS = "standbys"
    ETCD = "etcd"
    REPORT_BUG = "report bug"
    RERUN = "rerun"
    START_OVER = "start over"
    RESUME = "resume"
    LOOK_AT_EXIT = "look at exit"


# Causes for which advice is given even after a single loss.
WRONG = (Cause.DAMAGED, Cause.MISCOMPUTED)
ADVICE = {
    Cause.EXCEPTION: Advice.MEND_SCRIPT,
    Cause.MISMATCH: Advice.SAME_CALLS,
    Cause.STATE_MISMATCH: Advice.SAME_STATE,
    Cause.MISSING_MODULE: Advice.INSTALL,
    Cause.MEMORY_ERROR: Advice.MORE_MEMORY,
    Cause.GPU_MEMORY: Advice.LESS_GPU_MEMORY,
    Cause.DISK_FULL: Advice.FREE_DISK,
    Cause.WRITE_FAILED: Advice.FREE_DISK,
    Cause.GPU_ERROR: Advice.TEST_GPU,
    Cause.OUT_OF_MEMORY: Advice.MORE_MEMORY,
    Cause.EXIT_CODE: Advice.LOOK_AT_EXIT,
    Cause.NOT_STARTED: Advice.MEND_START,
    Cause.FROZEN: Advice.WHO_FROZE_IT,
    Cause.CUT_OFF: Advice.LOOK_AT_NETWORK,
    Cause.STUCK: Advice.LOOK_AT_STACKS,
    Cause.GPU_HANGS: Advice.TEST_GPU,
    Cause.DAMAGED: Advice.TEST_HOST,
    Cause.MISCOMPUTED: Advice.TEST_HOST,
    Cause.SPOILT: Advice.TEST_HOSTS,
    Cause.SHARDS_LOST: Advice.MORE_COPIES,
    Cause.TOO_SLOW: Advice.START_TIMEOUT,
    Cause.DISCONNECTED: Advice.LOOK_AT_NETWORK,
    Cause.HOST_LOST: Advice.LOOK_AT_HOST,
}


@dataclass(frozen=True)
class JobFinding:
    """One finding about a job.

    Args:
        facts: values for the finding's sentence. Times are in seconds since the start of the job. Workers have the form
            ``h:2#1`` (host:slot#start).
    """

    what: FindingKind
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JournalState:
    """State of a journal file at the time of reading.

    Args:
        runs: whether a driver is still writing the file, or None if unknown.
        earlier_s: duration of the job before the first line, in seconds, if the segments before were deleted. None if
            the journal contains the whole job, or if the duration is unknown.
    """

    settings: Settings | None = None
    runs: bool | None = None
    abandoned: bool = False  # the driver could not write the whole journal
    outlives: bool = False  # whether the workers continue without a driver
    left_out: int = 0  # number of lines that could not be decoded
    torn: bool = False  # whether the last line is incomplete
    from_the_middle: bool = False
    earlier_s: float | None = None


def findings(story: JobHistory, source: JournalState) -> list[JobFinding]:
    """Return all findings about a job."""
    cause = root_cause(story)
    found = [*_ending(story, source), *_why(story, source, cause)]
    if story.store_away is not None and story.view.end is None:
        # Show the outage and its cause before their consequences and the state of the journal.
        first = [FindingKind.STORE_AWAY, FindingKind.CAUSE]
        found.sort(key=lambda each: first.index(each.what) if each.what in first else len(first))
    found += [*_course(story), *_losses(story), *_cost(story)]
    found += [JobFinding(FindingKind.ADVICE, each) for each in _advice(story, source, cause)]
    return [*found, *_file(source)]


def root_cause(story: JobHistory) -> Death | None:
    """Return the first loss of the incident that ended the job or is in progress, or None without such an incident."""
    if story.after is not None:
        return story.after
    incident = story.last_incident
    over = story.view.end is not None and not (incident is not None and incident.ended)
    if incident is None or over or not (story.view.end or story.in_trouble()):
        return None
    return incident.first


def _since(story: JobHistory, at: float) -> float:
    return at - (story.began or 0.0)


# ---- the outcome ----------------------------------------------------------------------------------------------------


def _ending(story: JobHistory, source: JournalState) -> Iterator[JobFinding]:
    if story.began is None:
        yield JobFinding(FindingKind.NOTHING_HAPPENED, {"runs": source.runs})
        return
    end, after = story.view.end, _since(story, story.end_at if story.view.end else story.last)
    after += source.earlier_s or 0.0
    facts: dict[str, Any] = {"after_s": after, "workers": len(story.view.ranks)}
    newest = story.view.newest
    facts["step"] = step = story.view.step_of(newest)
    facts["commit"] = str(newest) if newest and (newest.number or step) else None
    facts |= _since_the_store(story, story.last)
    if end is None and source.runs:
        yield JobFinding(FindingKind.RUNS, facts)
        if story.spent.stall is not None:
            yield JobFinding(FindingKind.STALLS_NOW, _stall(story.spent.stall, story))
    elif end is None:
        yield JobFinding(FindingKind.CUT_OFF, {**facts, "abandoned": source.abandoned})
    elif story.code == 0:
        short = one_line(end.reason) if end.reason.facts.get("failed") else None
        yield JobFinding(FindingKind.DONE, {**facts, "short": short})
    elif story.stop is not None:
        yield JobFinding(FindingKind.STOPPED, {**facts, "by": story.stop})
    else:
        yield JobFinding(FindingKind.FAILED, {**facts, "code": story.code})
    if end is None and (wait := story.change_waits.current(story.last)) is not None:
        yield JobFinding(FindingKind.CHANGE_WAITS_NOW, wait.facts())


def _why(story: JobHistory, source: JournalState, cause: Death | None) -> Iterator[JobFinding]:
    end = story.view.end
    if story.began is None or story.code == 0:
        return
    if story.torn_driver:
        yield JobFinding(FindingKind.DRIVER_BUG, {"error": story.torn_driver})
        return
    if story.store_away is not None:
        yield JobFinding(FindingKind.STORE_AWAY, _silence(story.store_away, story))
    if story.stop is not None:
        return
    if cause is not None:
        facts = death_facts(cause, story) | _since_the_store(story, cause.at)
        yield JobFinding(FindingKind.CAUSE, facts)
    elif end is not None:
        yield JobFinding(FindingKind.CAUSE_UNKNOWN, {"reason": one_line(end.reason)})
    if story.after is not None and not story.after_raised:
        yield JobFinding(FindingKind.AFTER_TRAINING)
    elif end is not None:
        yield from _then(end.reason, cause)
    if cause is not None and end is not None:
        settings = source.settings
        elastic = settings is None or settings.elastic or story.after is not None
        if not elastic and story.trained_at is not None:
            yield JobFinding(FindingKind.NOT_ELASTIC)
        alike = [
            each for each in story.losses() if each.cause is cause.cause and each.what == cause.what
        ]
        if len(alike) >= REPEATS and story.trained_at is not None:
            ranks = {each.rank for each in alike}
            rank = ranks.pop() if len(ranks) == 1 else None
            yield JobFinding(FindingKind.REPEATED, {"times": len(alike), "rank": rank})
        if trace := _trace(story, cause):
            yield JobFinding(FindingKind.TRACE, {"text": trace, "who": named(cause)})


def _since_the_store(story: JobHistory, at: float) -> dict[str, float]:
    """Return the time from the loss of etcd to ``at`` as a fact, or no facts if etcd is available or the job has ended.

    Problems that begin after the loss of etcd are assumed to be its consequences.
    """
    if story.store_away is None or story.view.end is not None or at < story.store_away.at:
        return {}
    return {"after_store_s": at - story.store_away.at}


_WITHOUT_INIT = (ReasonKind.ALL_EXITED, ReasonKind.NO_TRAINING)
_GIVEN_BY_CAUSE = {
    *(ReasonKind.ENDED, ReasonKind.SCRIPT_RAISED, ReasonKind.TENSORS_DIFFER),
    *(ReasonKind.ALL_RETURNED, ReasonKind.ALL_EXITED),
}
_BRIEFLY = {
    ReasonKind.SAME_EXCEPTION: ("first", "worker", "commit"),
    ReasonKind.SCRIPT_FAILS: (),
    ReasonKind.SLOTS_SPENT: ("attempts", "needed"),
    ReasonKind.RESET_LIMIT: ("limit",),
    ReasonKind.RESTARTS_SPENT: ("limit",),
    ReasonKind.ALL_LOST: ("members", "generation"),
    ReasonKind.NO_COMMIT: (),
    ReasonKind.STUCK_AGAIN: ("worlds",),
    ReasonKind.IN_CIRCLES: ("worlds",),
    ReasonKind.TOO_FEW_SLOTS: ("usable", "needed", "attempts"),
    ReasonKind.TOO_FEW: ("ready", "needed", "within_s"),
}


def _then(reason: Reason, cause: Death | None) -> Iterator[JobFinding]:
    if cause is None or reason.kind in _GIVEN_BY_CAUSE:
        return
    names = _BRIEFLY.get(reason.kind)
    if names is None:
        yield JobFinding(FindingKind.THEN, {"kind": "other", "text": one_line(reason)})
        return
    facts = {name: reason.facts.get(name) for name in names}
    yield JobFinding(FindingKind.THEN, {"kind": reason.kind.value, **facts})


def _trace(story: JobHistory, cause: Death) -> str:
    for death in [cause, *story.losses()]:
        if death.trace and death.cause is cause.cause and death.what == cause.what:
            return death.trace
    return ""


def one_line(reason: Reason) -> str:
    """Return the first line of a reason's text, without quoted worker output."""
    if reason.facts.get("wrote"):
        reason = msgspec.structs.replace(reason, facts={**reason.facts, "wrote": ""})
    return str(reason).strip().partition("\n")[0].rstrip(":; ")


def named(death: Death) -> str:
    """Return a worker's name for use in a sentence.

    For example ``rank 1 of 4 (h:1#1)``, or ``worker h:1#1`` if it never joined a world.

    A rank alone is ambiguous, because another worker may have the same rank in the next world.
    """
    if death.rank is None:
        return f"worker {death.worker}"
    of_size = f" of {death.size}" if death.size else ""
    return f"rank {death.rank}{of_size} ({death.worker})"


def death_facts(death: Death, story: JobHistory) -> dict[str, Any]:
    """Return the values for the sentence about a loss."""
    return {
        "cause": death.cause.value,
        "who": named(death),
        "host": death.worker.host,
        "at_s": _since(story, death.at),
        "code": death.code,
        "signal": death.signal_name,
        "what": death.what,
        "connected": death.trained,
        **death.facts,
    }


# ---- the course of events -------------------------------------------------------------------------------------------


def _course(story: JobHistory) -> Iterator[JobFinding]:
    if story.began is None:
        return
    if story.begins is not None:
        yield JobFinding(FindingKind.RESUMED_FROM, msgspec.structs.asdict(story.begins))
    if story.trained_at is None:
        yield JobFinding(FindingKind.NEVER_TRAINED, {"started": story.view.started})
    yield from (finding for _, finding in sorted(_in_time(story), key=lambda each: each[0]))
    if (sharded := story.shards.facts) is not None:
        yield JobFinding(FindingKind.SHARDED, {**sharded, "ended": story.view.end is not None})
    if story.view.islands.last is not None:
        yield JobFinding(FindingKind.ISLANDS, _islands(story, story.view.islands))
    if story.view.failed_checks:
        yield JobFinding(FindingKind.UNHEALTHY, _unhealthy(story))
    if story.planned.count:
        yield JobFinding(FindingKind.PLANNED, {**vars(story.planned)})
    if story.view.durable is not None:
        step = story.view.step_of(story.view.durable)
        facts = {"count": story.view.checkpoints, "commit": str(story.view.durable), "step": step}
        yield JobFinding(FindingKind.CHECKPOINTS, {**facts, "ended": story.view.end is not None})
    if story.drivers > 1:
        yield JobFinding(FindingKind.DRIVERS, {"drivers": story.drivers})
    if story.more_silences:
        yield JobFinding(FindingKind.MORE_SILENCES, {"times": story.more_silences})


def _islands(story: JobHistory, islands: LateIslands) -> dict[str, Any]:
    assert islands.last is not None
    late = sorted(islands.islands.items(), key=lambda each: (-each[1].merges, each[0]))
    named = [
        {
            "name": name,
            "merges": each.merges,
            "first_s": _since(story, each.first_at),
            "last_s": _since(story, each.last_at),
            "late": each.late,
        }
        for name, each in late[:NAMED_ISLANDS]
    ]
    more = max(0, len(late) - NAMED_ISLANDS)
    last, facts = islands.last, {"waited_s": islands.waited_s, "islands": named, "more": more}
    return {"merges": last.merges, "position": last.position, "size": last.islands, **facts}


def _unhealthy(story: JobHistory) -> dict[str, Any]:
    failed = sorted(story.view.failed_checks.items())
    slots = [
        {
            "slot": f"{host}:{slot}",
            "outcome": each.outcome.value,
            "code": each.code,
            "line": each.line,
            "times": times,
            "passed": (host, slot) not in story.view.unhealthy,
        }
        for (host, slot), (times, each) in failed[:NAMED_SLOTS]
    ]
    return {"slots": slots, "more": max(0, len(failed) - NAMED_SLOTS)}


def _in_time(story: JobHistory) -> Iterator[tuple[float, JobFinding]]:
    if story.trained_at is not None:
        facts: dict[str, Any] = {
            "at_s": _since(story, story.trained_at),
            "largest": story.largest,
            "hosts": len(story.hosts),
            "started": story.view.started,
            "before": story.trained_at == story.began,
        }
        yield story.trained_at, JobFinding(FindingKind.TRAINING_BEGAN, facts)
    described = story.incidents
    between: list[Incident] = []
    if len(described) > FIRST + LAST:
        described, between = [*described[:FIRST], *described[-LAST:]], described[FIRST:-LAST]
    for each in described:
        yield each.at, _incident(each, story)
    if between:
        causes = Counter(_kind(each) for each in between)
        facts = {"count": len(between) + story.more_incidents, "causes": dict(causes.most_common())}
        yield between[0].at, JobFinding(FindingKind.MORE_INCIDENTS, facts)
    slow = [*story.slow.workers.values()]
    for each_slow in slow[:FIRST]:
        facts = {"at_s": _since(story, each_slow.since), **each_slow.facts(story.last)}
        yield each_slow.since, JobFinding(FindingKind.SLOW, facts)
    if (more := len(slow) - FIRST + story.slow.more) > 0:
        yield slow[FIRST - 1].since, JobFinding(FindingKind.MORE_SLOW, {"count": more})
    past = story.spent.stalls.past
    for stall in [*past][-FIRST:]:
        yield stall.since, JobFinding(FindingKind.STALL, _stall(stall, story))
    if (more := story.spent.stalls.count - FIRST) > 0:
        first = past[-FIRST].since
        over = story.spent.stalls.seconds
        seconds = over(-math.inf, math.inf, None) - over(first, math.inf, None)
        yield first, JobFinding(FindingKind.MORE_STALLS, {"count": more, "seconds": seconds})
    waits = [*story.change_waits.past][-FIRST:]
    for wait in waits:
        facts = {"at_s": _since(story, wait.since), **wait.facts()}
        yield wait.since, JobFinding(FindingKind.CHANGE_WAIT, facts)
    if (more := story.change_waits.count - FIRST) > 0:
        yield waits[0].since, JobFinding(FindingKind.MORE_CHANGE_WAITS, {"count": more})
    for at, event, done in story.requests:
        yield at, _request(at, event, done, story)
    for at, worker, leaving, why in story.overdue:
        facts = {"worker": str(worker), "leaving": str(leaving), "why": str(why)}
        yield at, JobFinding(FindingKind.OVERDUE, {"at_s": _since(story, at), **facts})
    for silence in story.silences:
        yield silence.at, JobFinding(FindingKind.STORE_SILENT, _silence(silence, story))


def _stall(stall: Stall, story: JobHistory) -> dict[str, Any]:
    return {"at_s": _since(story, stall.since), **stall.facts()}


def _silence(silence: StoreOutage, story: JobHistory) -> dict[str, Any]:
    back = None if silence.back_at is None else silence.back_at - silence.at
    return {**silence.reason.facts, "at_s": _since(story, silence.at), "back_after_s": back}


def _request(at: float, event: Event, done: bool, story: JobHistory) -> JobFinding:
    facts: dict[str, Any] = {"at_s": _since(story, at), "done": done}
    match event:
        case ScaleRequested(_, workers):
            facts |= {"kind": "scale", "workers": workers}
        case DrainRequested(_, host, off):
            facts |= {"kind": "drain off" if off else "drain", "host": host}
        case RemoveRequested(_, worker):
            facts |= {"kind": "remove", "worker": str(worker)}
        case _:
            facts |= {"kind": ""}
    return JobFinding(FindingKind.REQUEST, facts)


def _kind(incident: Incident) -> str:
    if incident.first is None:
        return "broken collective"
    return incident.first.cause.value


def _incident(incident: Incident, story: JobHistory) -> JobFinding:
    facts: dict[str, Any] = {
        "at_s": _since(story, incident.at),
        "size": incident.size,
        "size_after": incident.size_after,
        "recovered_ms": incident.recovered_ms,
        "phases_ms": incident.phases_ms,
        "copied_bytes": incident.copied_bytes,
        "shards": recovery_facts(incident.shards),
        "commit": str(incident.commit) if incident.commit else None,
        "step": incident.step,
        "newest": str(incident.newest) if incident.newest else None,
        "from_checkpoint": incident.from_checkpoint,
        "uncommitted": incident.uncommitted,
        "spoilt": incident.spoilt,
        "ended": incident.ended,
        "ended_after_s": max(0.0, story.end_at - incident.at) if story.view.end else 0.0,
        "broke": one_line(incident.broke) if incident.broke else "",
    }
    first = incident.first
    if first is not None:
        facts["first"] = death_facts(first, story)
        others = [d for d in incident.deaths if d is not first and d.cause is not Cause.SPOILT]
        facts["others"] = [death_facts(each, story) for each in others[:8]]
        facts["more"] = max(0, len(others) - 8)
    return JobFinding(FindingKind.INCIDENT, facts)


# ---- lost work, and the cost ----------------------------------------------------------------------------------------


def _losses(story: JobHistory) -> Iterator[JobFinding]:
    if story.trained_at is None:
        return
    behind = [
        each
        for each in story.incidents
        if each.newest is not None
        and each.size_after
        and (each.commit or each.newest) < each.newest
    ]
    lost_s = story.spent.total().lost
    failed = story.view.end is not None and story.view.end.code != 0
    durable, newest = story.view.durable, story.view.newest
    saved = durable is not None and newest is not None and durable >= newest
    if failed and newest is not None and not saved:
        facts: dict[str, Any] = {
            "commit": str(newest),
            "step": story.view.step_of(newest),
            "durable": None if durable is None else str(durable),
            "durable_step": None if durable is None else story.view.step_of(durable),
            "uncommitted": story.uncommitted,
        }
        yield JobFinding(FindingKind.LOST_ALL, facts)
    if behind:
        worst = behind[-1]
        facts = {
            "times": len(behind),
            "newest": str(worst.newest),
            "newest_step": worst.newest_step,
            "commit": str(worst.commit),
            "step": worst.step,
            "from_checkpoint": worst.from_checkpoint,
            "spoilt": worst.spoilt,
        }
        yield JobFinding(FindingKind.LOST_COMMITS, facts)
    behind_it = story.code == 0 and durable is not None and newest is not None and durable < newest
    if behind_it:
        facts = {
            "commit": str(newest),
            "step": story.view.step_of(newest),
            "durable": str(durable),
            "durable_step": story.view.step_of(durable),
        }
        yield JobFinding(FindingKind.NOT_DURABLE, facts)
    if lost_s > 0.005:
        yield JobFinding(
            FindingKind.LOST_STEPS, {"lost_s": lost_s, "incidents": len(story.incidents)}
        )
    elif not (behind or behind_it) and (saved or not failed) and story.view.end is not None:
        yield JobFinding(FindingKind.LOST_NOTHING)


def _cost(story: JobHistory) -> Iterator[JobFinding]:
    if story.began is None:
        return
    took = sorted(each.recovered_ms for each in story.incidents if each.recovered_ms is not None)
    recovered = [each for each in took if each > 0]
    if recovered:
        middle = recovered[len(recovered) // 2]
        facts = {"count": len(recovered), "median_ms": middle, "longest_ms": recovered[-1]}
        yield JobFinding(FindingKind.RECOVERIES, facts)
    yield JobFinding(FindingKind.TIME, time_facts(story))


def time_facts(story: JobHistory) -> dict[str, Any]:
    """Return the facts about time, in seconds: the job's time by stretch, and the workers' time by part."""
    total = story.spent.total()
    parts = dict(zip(PARTS, msgspec.structs.astuple(total), strict=True))
    worked = sum(parts.values())
    stretches = story.spent.stretches()
    return {
        "job": {name: stretches[name] for name in STRETCHES},
        "workers": parts,
        "job_s": sum(stretches.values()),
        "workers_s": worked,
        "goodput": story.spent.goodput(),
    }


# ---- advice ---------------------------------------------------------------------------------------------------------


def _advice(
    story: JobHistory, source: JournalState, cause: Death | None
) -> Iterator[dict[str, Any]]:
    given: set[tuple[Advice, str | None]] = set()
    for advice, facts in _advices(story, source, cause):
        if (key := (advice, facts.get("check"))) not in given:
            given.add(key)
            yield {"advice": advice.value, **facts}


def _advices(
    story: JobHistory, source: JournalState, cause: Death | None
) -> Iterator[tuple[Advice, dict[str, Any]]]:
    if story.began is None:
        return
    if story.torn_driver:
        yield Advice.REPORT_BUG, {}
    if story.store_away is not None:
        yield Advice.ETCD, {"store": story.store_away.reason.facts.get("store", "")}
    settings, end = source.settings, story.view.end
    failed = end is not None and end.code != 0 and story.stop is None
    elastic = settings is not None and settings.elastic
    if (
        end is not None
        and end.reason.kind in _WITHOUT_INIT
        and elastic
        and not story.view.generation
    ):
        yield Advice.CALL_INIT, {}
    if end is not None and end.reason.kind is ReasonKind.LOST_PEER_OUTSIDE:
        yield Advice.BE_ELASTIC, {"np": 0}
    if cause is not None:
        yield _against(cause)
    for check, text in story.view.mistakes.items():
        yield Advice.SCRIPT_CHECK, {"check": check, "text": text}
    if failed and cause is not None and settings is not None and story.trained_at is not None:
        if not settings.elastic:
            # In an elastic job, an error in the script would also occur in the replacement worker.
            if cause.cause not in OF_THE_SCRIPT:
                yield Advice.BE_ELASTIC, {"np": settings.np}
        elif end is not None and end.reason.kind in (ReasonKind.TOO_FEW, ReasonKind.TOO_FEW_SLOTS):
            yield Advice.FEWER_NEEDED, {"needed": settings.workers_min}
        elif end is not None and end.reason.kind is ReasonKind.RESET_LIMIT:
            yield Advice.RESET_LIMIT, {"limit": settings.reset_limit}
    if (
        failed
        and end is not None
        and end.reason.kind in (ReasonKind.ALL_LOST, ReasonKind.NO_COMMIT)
    ):
        yield Advice.CHECKPOINTS, {}
    for host in sorted({host for host, _ in story.view.unhealthy})[:1]:
        yield Advice.UNHEALTHY_HOST, {"host": host}
    if end is None and not (source.runs or source.abandoned) and story.store_away is None:
        if source.outlives:
            yield Advice.RESUME, {}
        else:
            held = story.view.durable is not None or story.begins is not None
            yield Advice.RERUN if held else Advice.START_OVER, {}
    yield from (_against(each) for each in story.losses() if each.cause in WRONG)
    counted = Counter((each.cause, each.what) for each in story.losses() if each is not cause)
    for (kind, _), count in counted.most_common(3):
        if count >= REPEATS and kind not in FOLLOWS:
            alike = next(each for each in story.losses() if each.cause is kind)
            yield _against(alike)
    yield from _about_time(story, failed)


def _against(death: Death) -> tuple[Advice, dict[str, Any]]:
    facts = {"host": death.worker.host, "who": named(death), "signal": death.signal_name}
    if death.cause is Cause.SIGNAL:
        match death.signal_name:
            case "SIGKILL" | "SIGTERM" | "SIGINT" | "SIGHUP" | "":
                return Advice.WHO_KILLED_IT, facts
            case "SIGBUS":
                return Advice.SHARED_MEMORY, facts
            case _:
                return Advice.CRASH, facts
    if death.cause is Cause.LOST_PEER:
        return Advice.BE_ELASTIC, {"np": 0}
    return ADVICE[death.cause], facts


def _about_time(story: JobHistory, failed: bool) -> Iterator[tuple[Advice, dict[str, Any]]]:
    longest = max(
        [*story.spent.stalls.past, *filter(None, [story.spent.stall])],
        key=lambda stall: stall.seconds,
        default=None,
    )
    # If the driver killed the worker, it has requested the stacks, so the user need not do so.
    if longest is not None and longest.end is not StallEnd.KILLED:
        facts = longest.facts()
        if longest.culprits and (longest.end is None or longest.seconds >= MUCH_STALLED_S):
            yield Advice.LOOK_AT_LINE, {"who": blamed(facts), "rank": longest.culprits[0].rank}
    slowest = max(
        (each.facts(story.last) for each in story.slow.workers.values()),
        key=lambda facts: float(facts["seconds"]),
        default=None,
    )
    if slowest is not None and slowest["seconds"] >= MUCH_SLOW_S:
        yield Advice.LOOK_AT_SPEED, slowest
    parts = story.spent.total()
    worked = sum(msgspec.structs.astuple(parts))
    if not worked or story.trained_at is None:
        return
    stalls = sum(each.cause in STALLS for each in story.losses())
    commits = story.commits.last if story.commits.count else 0.0
    every_s = story.spent.stretches()["training"] / max(1.0, commits)
    if parts.lost > MUCH_LOST * worked and not stalls and every_s > OFTEN_S:
        facts = {"share": parts.lost / worked, "commits": commits, "every_s": every_s}
        if not story.uncommitted:
            yield Advice.COMMIT_MORE_OFTEN, facts
        elif NO_COMMIT not in story.view.mistakes:
            yield Advice.CALL_COMMIT, facts
    restarted = story.view.started > 2 * max(1, story.largest)
    if not failed and restarted and parts.joining > MUCH_JOINING * worked:
        yield Advice.PRELOAD, {"share": parts.joining / worked}
        yield Advice.STANDBYS, {}


def _file(source: JournalState) -> Iterator[JobFinding]:
    if source.from_the_middle:
        facts = {} if source.earlier_s is None else {"earlier_s": source.earlier_s}
        yield JobFinding(FindingKind.FROM_THE_MIDDLE, facts)
    if source.abandoned:
        yield JobFinding(FindingKind.NOT_WRITTEN_ON)
    if source.left_out or source.torn:
        yield JobFinding(
            FindingKind.LINES_LEFT_OUT, {"count": source.left_out, "torn": source.torn}
        )
