"""Sentences that describe findings. For display only: the wording may change at any time. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic.driver.monitoring.explain.findings import Advice, FindingKind, JobFinding
from elastic.driver.monitoring.explain.loss_causes import Cause
from elastic.driver.monitoring.shard_status import as_sentence as sharded_sentence
from elastic.driver.monitoring.shard_status import source_sentence
from elastic.driver.monitoring.stalls import ENDS, StallEnd, as_sentence
from elastic.driver.monitoring.straggler_records import SlowEnd
from elastic.driver.monitoring.time_accounting import LEAST_S, WORDS
from elastic.driver.reasons import (
    ReasonKind,
    because,
    commit_id,
    counted,
    start_checkpoint,
    waiting_workers,
)
from elastic.protocol.messages import MISTAKE_LIMIT, at_step

Facts = Mapping[str, Any]
GOODPUT = "the share spent on training that was not lost"
LINE = 400  # maximum number of characters of a quoted text from outside this program
HEADINGS = {
    "ended": "",
    "advice": "What to change",
    "trace": "Traceback",
    "course": "What happened",
    "lost": "What was lost",
    "cost": "What it cost",
    "file": "About the journal",
}
_SECTIONS = {
    FindingKind.TRACE: "trace",
    FindingKind.RESUMED_FROM: "course",
    FindingKind.TRAINING_BEGAN: "course",
    FindingKind.NEVER_TRAINED: "course",
    FindingKind.INCIDENT: "course",
    FindingKind.SHARDED: "course",
    FindingKind.ISLANDS: "course",
    FindingKind.UNHEALTHY: "course",
    FindingKind.SLOW: "course",
    FindingKind.MORE_SLOW: "course",
    FindingKind.STALL: "course",
    FindingKind.MORE_STALLS: "course",
    FindingKind.CHANGE_WAIT: "course",
    FindingKind.MORE_CHANGE_WAITS: "course",
    FindingKind.MORE_INCIDENTS: "course",
    FindingKind.REQUEST: "course",
    FindingKind.OVERDUE: "course",
    FindingKind.PLANNED: "course",
    FindingKind.CHECKPOINTS: "course",
    FindingKind.DRIVERS: "course",
    FindingKind.STORE_SILENT: "course",
    FindingKind.MORE_SILENCES: "course",
    FindingKind.LOST_NOTHING: "lost",
    FindingKind.LOST_STEPS: "lost",
    FindingKind.LOST_COMMITS: "lost",
    FindingKind.LOST_ALL: "lost",
    FindingKind.NOT_DURABLE: "lost",
    FindingKind.RECOVERIES: "cost",
    FindingKind.TIME: "cost",
    FindingKind.ADVICE: "advice",
    FindingKind.LINES_LEFT_OUT: "file",
    FindingKind.FROM_THE_MIDDLE: "file",
    FindingKind.NOT_WRITTEN_ON: "file",
}


def sections(found: Iterable[JobFinding]) -> dict[str, list[tuple[JobFinding, str]]]:
    """Group findings and their sentences by section, in the order of HEADINGS."""
    grouped: dict[str, list[tuple[JobFinding, str]]] = {name: [] for name in HEADINGS}
    for finding in found:
        grouped[_SECTIONS.get(finding.what, "ended")].append((finding, sentence(finding)))
    return grouped


def sentence(finding: JobFinding) -> str:
    """Return the text of a finding: one or more sentences. A quoted traceback spans several lines."""
    return _SENTENCES[finding.what](finding.facts)


def duration(seconds: float) -> str:
    """Format a duration given in seconds, for example as ``3.2 s``, ``4 min 12 s`` or ``2 h 3 min``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def milliseconds(ms: float) -> str:
    """Format a duration given in milliseconds, for example as ``58 ms`` or ``3.4 s``."""
    return f"{ms:.0f} ms" if ms < 1000 else duration(ms / 1000)


def number(value: float) -> str:
    """Format a number: integers with all digits, others with four significant digits.

    Very large and very small numbers use exponent notation.
    """
    size = abs(float(f"{value:.4g}"))
    if size and not 1e-4 <= size < 1e7:
        return f"{value:.4g}"
    digits = 0 if value == int(value) or size >= 1000 else 3 - math.floor(math.log10(size))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shown(text: str, limit: int = LINE) -> str:
    """Shorten a text from outside this program to one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."


# ---- losses and their causes ----------------------------------------------------------------------------------------

_CRASHES = {
    "SIGSEGV": "it accessed invalid memory (segmentation fault)",
    "SIGBUS": "the backing of a memory mapping was missing, as with a full /dev/shm",
    "SIGABRT": "a library called abort()",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an instruction that this processor does not support",
}


def _death(facts: Facts) -> str:
    name, what = facts["who"], shown(facts["what"])
    match Cause(facts["cause"]):
        case Cause.EXCEPTION:
            return f"{name} raised {what}"
        case Cause.MISMATCH:
            return f"the ranks submitted mismatched tensors: {what}"
        case Cause.STATE_MISMATCH:
            return f"{name} was rejected: its model, optimizer or state differs from that of the others"
        case Cause.MISSING_MODULE:
            return f"{name} could not import a module: {what}"
        case Cause.MEMORY_ERROR:
            return f"{name} could not allocate host memory: {what}"
        case Cause.GPU_MEMORY:
            return f"{name} ran out of GPU memory: {what}"
        case Cause.DISK_FULL:
            return f"{name} could not write to a full disk (No space left on device): {what}"
        case Cause.WRITE_FAILED:
            return f"{name} could not write a file, most likely because its disk is full: {what}"
        case Cause.GPU_ERROR:
            return f"the GPU of {name} or NCCL failed: {what}"
        case Cause.OUT_OF_MEMORY:
            limit = f" ({what}, which all processes of its cgroup share)" if what else ""
            return f"{name} ran out of memory: the kernel killed it{limit}"
        case Cause.SIGNAL if not facts["signal"]:
            return f"{name} had exited when its agent reconnected"
        case Cause.SIGNAL if facts["signal"] in _CRASHES:
            return f"{name} crashed with {facts['signal']}: {_CRASHES[facts['signal']]}"
        case Cause.SIGNAL:
            return f"{name} was killed with {facts['signal']} from outside this job"
        case Cause.EXIT_CODE if facts.get("call"):
            return f"{name} called {facts['call']}"
        case Cause.EXIT_CODE:
            return f"{name} ended with exit code {facts['code']}"
        case Cause.NOT_STARTED:
            return f"{name} could not be started: {what}"
        case Cause.FROZEN:
            return f"{name} was frozen: {facts.get('how', what)}; it did not respond, so this job killed it (SIGKILL)"
        case Cause.CUT_OFF:
            return f"{name} was cut off from the network: its host stopped acknowledging packets"
        case Cause.STUCK:
            doing = "idle" if facts.get("why") == ReasonKind.IDLE.value else "busy"
            where = f" {facts['where']}" if facts.get("where") else ""
            where = where.replace(" in '", " in the collective '")
            for_s = f" for {float(facts['for_s']):.0f} s" if facts.get("for_s") else ""
            return f"{name} was stuck: it was {doing}{for_s} while the others waited for it{where}"
        case Cause.GPU_HANGS:
            return f"the GPU of {name} hung: {what}"
        case Cause.DAMAGED:
            return f"{name} had a corrupted state: {what}"
        case Cause.MISCOMPUTED:
            return f"{name} was outvoted by other workers: {what}{_since(facts)}"
        case Cause.TOO_SLOW:
            return f"{name} took too long: {what}"
        case Cause.DISCONNECTED:
            return f"{name} lost its connection: {what}"
        case Cause.HOST_LOST:
            return f"host {facts['host']} was lost, and {name} with it: {what}"
        case Cause.LOST_PEER:
            return f"{name} lost its peers and could not continue: {what}"
        case Cause.SHARDS_LOST:
            return f"{name} could not continue: {what}"
        case Cause.SPOILT:
            return (
                "damaged memory of an unidentified worker made gradients infinite or NaN, and corrupted all"
                f" replicas at commit {commit_id(facts.get('commit', ''))}"
            )


def _since(facts: Facts) -> str:
    agreed = int(facts.get("agreed", -1))
    if agreed < 0:
        return "; none of its earlier gradients in that world were verified"
    return f"; its gradients were last verified in step {agreed}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cause(facts: Facts) -> str:
    if "after_store_s" in facts:
        later = duration(facts["after_store_s"])
        return f"Then, {later} after etcd was lost: {_death(facts)}. Without etcd the driver could not replace it."
    return f"{_capital(_death(facts))}."


# ---- the outcome ----------------------------------------------------------------------------------------------------


def _done(facts: Facts) -> str:
    commit = f", at {_commit(facts)}" if facts["commit"] else ""
    if facts.get("short"):
        return f"The job ended after {duration(facts['after_s'])}{commit}: {shown(facts['short'])}."
    return f"The job succeeded after {duration(facts['after_s'])}{commit}."


def _runs(facts: Facts) -> str:
    return (
        f"The job runs: {counted(facts['workers'], 'worker')} in the current world, {duration(facts['after_s'])}"
        " since its start."
    )


def _cut_off(facts: Facts) -> str:
    if facts["abandoned"]:
        return (
            f"The journal ends in the middle of the job, after {duration(facts['after_s'])}: its driver could not"
            " write more of it (for example, because the disk was full), and the job continued."
        )
    if "after_store_s" in facts:
        return (
            f"The journal ends {duration(facts['after_store_s'])} after etcd was lost, in the middle of the job:"
            " its driver was killed, its machine went down, or this is a copy of a journal that is still being"
            " written."
        )
    return (
        f"The journal ends in the middle of the job, after {duration(facts['after_s'])}: its driver was killed, its"
        " machine went down, its disk was full, or this is a copy of a journal that is still being written."
    )


def _nothing(facts: Facts) -> str:
    why = (
        "it has just started" if facts["runs"] else "the job's driver ended before the first event"
    )
    return f"The journal has no events: {why}."


def _store_away(facts: Facts) -> str:
    return (
        f"The job lost etcd, without which its driver makes no decisions: etcd at {facts['store']} stopped"
        f" answering {duration(facts['at_s'])} after the start ({facts['text']}), and did not recover."
    )


def _then(facts: Facts) -> str:
    match facts["kind"]:
        case ReasonKind.SAME_EXCEPTION.value:
            return (
                f"{facts['first']} and {facts['worker']} raised the same exception, both at commit"
                f" {commit_id(facts['commit'])}: every worker that resumes from it would raise it, so the job"
                " ended."
            )
        case ReasonKind.SCRIPT_FAILS.value:
            return "Every worker ended before training began, so the job ended."
        case ReasonKind.SLOTS_SPENT.value:
            attempts = counted(facts["attempts"], "attempt")
            return f"Every slot was excluded after {attempts}, but the job needs {counted(facts['needed'], 'worker')}."
        case ReasonKind.RESET_LIMIT.value:
            return f"--reset-limit {facts['limit']} allows no more failures, so the job ended."
        case ReasonKind.RESTARTS_SPENT.value:
            return f"--restarts {facts['limit']} allows no more restarts from a checkpoint, so the job ended."
        case ReasonKind.ALL_LOST.value:
            members = counted(facts["members"], "worker")
            return f"All {members} of generation {facts['generation']} were lost, so no worker held a commit."
        case ReasonKind.NO_COMMIT.value:
            return "No survivor held a commit to continue from."
        case ReasonKind.STUCK_AGAIN.value:
            worlds = counted(facts["worlds"], "world")
            return f"In each of the last {worlds} a worker was stuck without a new commit, so the job ended."
        case ReasonKind.IN_CIRCLES.value:
            return f"{facts['worlds']} consecutive recoveries made no progress, so the job ended."
        case ReasonKind.TOO_FEW_SLOTS.value:
            needed, usable = counted(facts["needed"], "worker"), counted(facts["usable"], "slot")
            return (
                f"The job needs at least {needed}: {usable} of its fixed list of hosts could still be used; all others"
                f" were excluded after {counted(facts['attempts'], 'attempt')}."
            )
        case ReasonKind.TOO_FEW.value:
            needed = counted(facts["needed"], "worker")
            return (
                f"The job needs at least {needed}: it had {facts['ready']}, and no other worker joined within"
                f" {facts['within_s']:g} s."
            )
        case _:
            return f"The job ended because: {shown(facts['text'])}."


def _repeated(facts: Facts) -> str:
    same = f", each of them as rank {facts['rank']}" if facts.get("rank") is not None else ""
    return f"{facts['times']} workers were lost in this way in total{same}."


def _trace(facts: Facts) -> str:
    return f"The traceback of {facts['who']}:\n" + str(facts["text"])


# ---- the course of events -------------------------------------------------------------------------------------------


def _training_began(facts: Facts) -> str:
    what, since, in_all = "began", "", " in total"
    if facts["before"]:  # The journal is a copy that begins in the middle of a job.
        what, since, in_all = "continued", " since then", ""
    return (
        f"{_at(facts)} Training {what}; the largest world{since} had {counted(facts['largest'], 'worker')},"
        f" on {counted(facts['hosts'], 'host')}"
        f" ({counted(facts['started'], 'process').replace('processs', 'processes')} started{in_all})."
    )


def _from_the_middle(facts: Facts) -> str:
    if "earlier_s" not in facts:
        return "This copy starts in the middle of the job: earlier events are missing."
    return (
        f"The journal starts {duration(facts['earlier_s'])} after the start of the job, because its older segments were"
        " deleted. All times, losses and costs above are counted from there, except the duration of the job."
    )


def _at(facts: Facts) -> str:
    return f"+{duration(facts['at_s'])}:"


def _incident(facts: Facts) -> str:
    first = facts.get("first")
    if first is None:
        lead = (
            f"The world failed: {shown(facts['broke'])}" if facts["broke"] else "The world failed"
        )
    else:
        lead = _capital(_death(first))
    return f"{_at(facts)} {lead}.{_others(facts)} {_after(facts)}".rstrip()


def _others(facts: Facts) -> str:
    others = facts.get("others") or []
    first, spoilt = facts.get("first") or {}, ""
    if facts["spoilt"] and first.get("cause") == Cause.DAMAGED.value:
        spoilt = " Its gradients had corrupted the replicas of all others too."
    if not others:
        return spoilt
    count = len(others) + facts["more"]
    alike = {each["cause"] for each in others} == {facts["first"]["cause"]}
    if alike:
        names = ", ".join(each["who"].removeprefix("worker ") for each in others)
        return f"{spoilt} The same happened to {names}{' and others' if facts['more'] else ''}."
    clauses = "; ".join(_death(each) for each in others[:3])
    more = f"; and {count - 3} more" if count > 3 else ""
    return f"{spoilt} Then {clauses}{more}."


def _after(facts: Facts) -> str:
    if facts["ended"]:
        later = facts["ended_after_s"]
        return f"The job ended {duration(later)} later." if later >= 0.1 else "The job ended."
    if facts["recovered_ms"] is None:
        size = facts["size_after"]
        if size is None:
            return "" if facts["broke"] or not facts["size"] else "No other worker was affected."
        begun = ", restarted from a checkpoint" if facts["from_checkpoint"] else ""
        return f"{counted(size, 'worker')} formed a new world{begun}."
    held = f" from {_commit(facts)}" if facts["commit"] else ""
    if facts["from_checkpoint"]:
        why = (
            "the commits in memory were corrupted"
            if facts["spoilt"]
            else "no complete commit was left in memory"
        )
        held = f" from {_checkpoint(facts)}, because {why}"
    elif facts.get("uncommitted"):
        held = " from the beginning, because no commit was made"
    size = facts["size_after"]
    subject = counted(size, "worker") if size else "The others"
    copied = facts["copied_bytes"] / 1e6
    much = f", {copied:.1f} MB copied to new workers" if copied >= 0.1 else ""
    source = source_sentence(facts["shards"])
    shards = f" {_capital(source)}." if source else ""
    return f"{subject} resumed training {milliseconds(facts['recovered_ms'])} later{held}{much}.{shards}"


def _checkpoint(facts: Facts) -> str:
    return f"the checkpoint of {_commit(facts)}" if facts["commit"] else "a checkpoint"


def _commit(facts: Facts, commit: str = "commit", step: str = "step") -> str:
    return at_step(facts[commit], facts.get(step))


def _request(facts: Facts) -> str:
    match facts["kind"]:
        case "scale":
            wish = f"{counted(facts['workers'], 'worker')}"
        case "drain":
            wish = f"the drain of host {facts['host']}"
        case "drain off":
            wish = f"the end of the drain of host {facts['host']}"
        case "remove":
            wish = f"the removal of worker {facts['worker']}"
        case _:
            wish = "an action that is unknown to this version"
    return f"{_at(facts)} An operator requested {wish}{'' if facts['done'] else ', which was rejected'}."


def _store_silent(facts: Facts) -> str:
    back = facts["back_after_s"]
    then = "did not recover" if back is None else f"answered again {duration(back)} later"
    return f"{_at(facts)} etcd at {facts['store']} stopped answering ({shown(facts['text'])}), and {then}."


def _more_incidents(facts: Facts) -> str:
    causes = ", ".join(f"{count} x {cause}" for cause, count in list(facts["causes"].items())[:6])
    return f"... {facts['count']} more incidents in between" + (f": {causes}." if causes else ".")


def _change_wait(facts: Facts) -> str:
    waited = waiting_workers(facts, past=True)
    why = (
        "until the others reached a commit"
        if facts["reached"]
        else "and the others reached no commit"
    )
    return f"{_at(facts)} {waited} for {duration(facts['for_s'])}, {why}."


_SLOW_ENDS = {
    None: "it is still slow",
    SlowEnd.RECOVERED.value: "then its speed recovered",
    SlowEnd.REPLACED.value: "then a standby replaced it",
    SlowEnd.LEFT.value: "then it left the world",
    SlowEnd.WORLD_ENDED.value: "then the world changed",
    SlowEnd.JOB_ENDED.value: "then the job ended",
}


def _slow(facts: Facts) -> str:
    periods = f" in {facts['periods']} periods" if facts["periods"] > 1 else ""
    share = facts["others_wait"]
    waited = "" if share is None else f" The others waited {share:.0%} of that time."
    return (
        f"{_at(facts)} Rank {facts['rank']} ({facts['worker']}) was a straggler for"
        f" {duration(facts['seconds'])}{periods}: its speed was {facts['speed']:.2f} times the median of the others;"
        f" {_SLOW_ENDS[facts['end']]}.{waited}"
    )


def _islands(facts: Facts) -> str:
    text = (
        f"{counted(facts['size'], 'island')} merged {counted(facts['merges'], 'time')} up to inner step"
        f" {facts['position']}; rank 0 waited {duration(facts['waited_s'])} for merges."
    )
    for each in facts["islands"]:
        begin, end = duration(each["first_s"]), duration(each["last_s"])
        at = f"at +{begin}" if begin == end else f"from +{begin} to +{end}"
        text += (
            f" Island {shown(each['name'], 80)} was late for {counted(each['merges'], 'merge')}, {at}"
            + (
                "; the last merge did not wait for it."
                if each["late"]
                else "; later merges contain its changes."
            )
        )
    return text + (f" {counted(facts['more'], 'more island')} were late." if facts["more"] else "")


def _unhealthy(facts: Facts) -> str:
    texts = []
    for each in facts["slots"]:
        times = "once" if each["times"] == 1 else f"{each['times']} times"
        then = ", then one passed" if each["passed"] else ""
        texts.append(f"{because(ReasonKind.UNHEALTHY, **each)} ({times}{then})")
    more = f"; and {facts['more']} more" if facts["more"] else ""
    return f"Slots were kept out of the world: {'; '.join(texts)}{more}."


def _planned(facts: Facts) -> str:
    count = facts["count"]
    times = "once" if count == 1 else f"{count} times"
    return (
        f"The world changed as planned {times}, as workers joined or left; the longest change took"
        f" {milliseconds(facts['longest_ms'])}."
    )


# ---- lost work, and the cost ----------------------------------------------------------------------------------------


def _lost_steps(facts: Facts) -> str:
    return (
        f"{duration(facts['lost_s'])} of training, summed over all workers: the work between each loss and the last"
        " commit before it."
    )


def _lost_commits(facts: Facts) -> str:
    times = "Once" if facts["times"] == 1 else f"{facts['times']} times"
    if facts["spoilt"]:
        why = "the newer ones were corrupted by damaged memory"
    elif facts["from_checkpoint"]:
        why = "that of the newest checkpoint, as no worker held a newer one"
    else:
        why = "the worker that held the newer one was lost"
    return (
        f"{times} training resumed from an older commit than the newest, {_commit(facts)} instead of"
        f" {_commit(facts, 'newest', 'newest_step')}: {why}."
    )


def _lost_all(facts: Facts) -> str:
    if facts["durable"]:
        return (
            f"Training from {_commit(facts, 'durable', 'durable_step')} up to {_commit(facts)} was only in the memory"
            " of the workers. Resume from the newest checkpoint."
        )
    all_of_it = (
        f"All training up to {_commit(facts)} was in the memory of the workers, which have ended."
    )
    if facts.get("uncommitted"):
        all_of_it = "All training, because no commit was made."
    return f"{all_of_it} Files that the script itself wrote still exist."


def _recoveries(facts: Facts) -> str:
    count, longest = facts["count"], milliseconds(facts["longest_ms"])
    if count == 1:
        return f"Recovered in {longest}, from the loss to the next step of all workers."
    middle = milliseconds(facts["median_ms"])
    return (
        f"Recovered in {middle} (median of {count}), {longest} at most, from a loss to the next step of all"
        " workers."
    )


def _time(facts: Facts) -> str:
    job = ", ".join(f"{WORDS[name]} {s:.1f} s" for name, s in facts["job"].items() if s >= 0.05)
    workers = ", ".join(f"{name} {s:.1f} s" for name, s in facts["workers"].items() if s >= 0.05)
    text = f"The job took {facts['job_s']:.1f} s: {job or 'nothing'}."
    if facts["goodput"] is None:
        return text
    return (
        f"{text} The workers' {facts['workers_s']:.1f} s: {workers or 'nothing'}."
        f" Goodput {facts['goodput']:.3f}: {GOODPUT}."
    )


_MEANT = {
    "stalled": "no training, since ranks waited for another one",
    "storage": "reading a checkpoint, or waiting for one",
    "recovering": "from the end of a world until the next one trains",
    "joining": "from its start until it trains, and while others join or leave",
    "lost": "training that had to be repeated",
    "idle": "after its training, until its exit",
}


def parts_meant(facts: Facts) -> str:
    """Return explanations of those parts of the workers' time that are not zero and need an explanation."""
    had = [name for name in _MEANT if facts["workers"][name] >= LEAST_S]
    return "; ".join(f"{name}: {_MEANT[name]}" for name in had)


def _lines_left_out(facts: Facts) -> str:
    clauses = []
    if facts["count"]:
        clauses.append(f"{counted(facts['count'], 'line')} could not be read and were skipped")
    if facts["torn"]:
        clauses.append("the last line is incomplete (after a crash, or in a copy)")
    return _capital("; ".join(clauses)) + "."


# ---- advice ---------------------------------------------------------------------------------------------------------


_GOES_ON = "from the live workers, else from the newest checkpoint in --checkpoint-dir"


# Format strings for the values of a finding.
_ADVICE = {
    Advice.MORE_MEMORY: (
        "Give the workers of {host} more memory, run fewer of them there, or reduce the memory use of each: a"
        " smaller batch, fewer DataLoader workers, fewer tensors kept between steps."
    ),
    Advice.LESS_GPU_MEMORY: (
        "Reduce the GPU memory use of each worker: a smaller batch, activation checkpointing, or fewer tensors"
        " kept between steps. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation."
    ),
    Advice.FREE_DISK: (
        "Free disk space on {host} where the script writes (see the last line of its own code in the traceback), or"
        " write elsewhere."
    ),
    Advice.SAME_CALLS: (
        "Make the same collective calls on all ranks, with tensors of the same shapes and dtypes. A rank with"
        " fewer batches than the others calls join() at its end."
    ),
    Advice.SAME_STATE: (
        "Build the same model, optimizer and state on every worker: the log shows the first difference."
    ),
    Advice.MEND_SCRIPT: "Fix the script or its data at the line shown; the cluster is fine.",
    Advice.INSTALL: (
        "Check the name; install the module in the Python that runs the workers on {host}, or add its folder to"
        " PYTHONPATH."
    ),
    Advice.MEND_START: "Run the command by hand on {host}: check the program, its path and its permissions.",
    Advice.TEST_GPU: (
        "Check the GPU's errors on {host} (nvidia-smi -q, Xid lines in dmesg), and remove it from the list of"
        " hosts until it is tested."
    ),
    Advice.TEST_HOST: "Test the memory and the processor of {host}, and do not use it until then.",
    Advice.UNHEALTHY_HOST: (
        "Repair {host}, or remove it from the list of hosts: its workers are admitted once a health check passes"
        " (elasticrun doctor -H {host} runs the built-in one)."
    ),
    Advice.TEST_HOSTS: (
        "Test the memory and the processors of all hosts: the faulty one could not be identified."
    ),
    Advice.LOOK_AT_LINE: (
        "Check what {who} does. Meanwhile `elasticrun stacks {rank}` shows its stack. If the pause is intended,"
        ' put it into `with elastic.long_phase("evaluate"):`.'
    ),
    Advice.LOOK_AT_STACKS: (
        "See the stacks of {who} in the log, written before it was killed. If the pause is intended, put it into"
        ' `with elastic.long_phase("evaluate"):`.'
    ),
    Advice.WHO_FROZE_IT: (
        "Find out what stopped {who} on {host}: SIGSTOP by a user or a debugger, a frozen container, a suspended"
        " machine. A longer --lease tolerates longer stops."
    ),
    Advice.LOOK_AT_NETWORK: "Check the network of {host}, and whether the machine itself was stopped.",
    Advice.LOOK_AT_SPEED: (
        "Find out why {worker} is slow: other load on {host}, a throttled processor or GPU, a slow disk, or more work"
        " than the others have. `elastic.Shards` gives a slower worker less work, and --replace-stragglers with"
        " --standbys replaces it."
    ),
    Advice.WHO_KILLED_IT: (
        "Find out what killed {who} on {host} ({seen}): see dmesg, the system's log, and the log of your batch"
        " system or container runtime. The kernel did not report that memory ran out."
    ),
    Advice.MORE_COPIES: (
        "Raise copies of elastic.TorchState: the number of workers on different hosts that can be lost at once."
    ),
    Advice.CRASH: (
        "{signal} is a crash in native code: an incompatible library, or a bug in an extension. Run the script"
        " with PYTHONFAULTHANDLER=1 to locate it."
    ),
    Advice.SHARED_MEMORY: (
        "Enlarge /dev/shm on {host} (in a container: --shm-size), or use fewer DataLoader workers."
    ),
    Advice.LOOK_AT_HOST: "Check whether {host} is up, whether its agent runs, and whether it reaches the driver.",
    Advice.START_TIMEOUT: "Raise --start-timeout, or move slow code from before hvd.init() to "
    "after it.",
    Advice.BE_ELASTIC: (
        "To survive a lost worker, start the job with --min-np, with the training loop in a function under"
        " @elastic.run."
    ),
    Advice.FEWER_NEEDED: (
        "Continue with fewer than {workers} (--min-np), or start more hosts, keep spares with --standbys, or wait"
        " longer with --elastic-timeout."
    ),
    Advice.RESET_LIMIT: "Raise --reset-limit (currently {limit}), or omit it.",
    Advice.CALL_INIT: (
        "Call hvd.init() in the script, and train in a function under @elastic.run (elasticrun docs migration): no"
        " worker called init(), so each ran alone."
    ),
    Advice.CHECKPOINTS: "Use --checkpoint-dir: checkpoints outlive all workers, and the job resumes from the newest.",
    Advice.SCRIPT_CHECK: "Fix the script: {text}.",
    Advice.CALL_COMMIT: (
        "Call state.commit() after optimizer.step(): {share:.0%} of the workers' time was repeated, as no commit was"
        " made."
    ),
    Advice.COMMIT_MORE_OFTEN: (
        "{share:.0%} of the workers' time was repeated, with {committed}: commit more often, up to once per step."
    ),
    Advice.PRELOAD: (
        "{share:.0%} of the workers' time was spent on imports and joining. If --preload auto finds no"
        " imports (elasticrun docs spot), name the modules: --preload torch."
    ),
    Advice.STANDBYS: "Use --standbys 1 to keep a spare worker that replaces a lost one at once.",
    Advice.ETCD: (
        "Restore etcd at {store}, and run several members of it. Then rerun the same command with --resume: it"
        " continues {goes_on}."
    ),
    Advice.REPORT_BUG: "Please report the bug, with this journal.",
    Advice.RESUME: "Rerun the same command with --resume: it continues {goes_on}.",
    Advice.RERUN: (
        "Rerun the same command: it resumes from the newest checkpoint, since the workers ended with their driver."
    ),
    Advice.START_OVER: (
        "Rerun the same command: it trains from the beginning, since the workers ended with their driver. Use"
        " --checkpoint-dir to resume from a checkpoint, or --resume from the first start on to keep the workers"
        " without a driver."
    ),
    Advice.LOOK_AT_EXIT: "See the last output of {who}: the script or a library exited without an exception.",
}


def _advice(facts: Facts) -> str:
    values = {
        **facts,
        "seen": facts.get("signal") or "its exit was not observed",
        "workers": counted(facts["needed"], "worker") if "needed" in facts else "",
        "goes_on": _GOES_ON,
        "text": shown(facts.get("text", ""), limit=MISTAKE_LIMIT),
        "committed": f"a commit every {duration(facts['every_s'])}"
        if facts.get("commits")
        else "no commit",
    }
    return _ADVICE[Advice(facts["advice"])].format_map(values)


_SENTENCES: dict[FindingKind, Callable[[Facts], str]] = {
    FindingKind.DONE: _done,
    FindingKind.FAILED: lambda f: (
        f"The job failed after {duration(f['after_s'])}, with exit code {f['code']}."
    ),
    FindingKind.STOPPED: lambda f: (
        f"The job was stopped after {duration(f['after_s'])}: {shown(f['by'])}."
    ),
    FindingKind.RUNS: _runs,
    FindingKind.STALLS_NOW: lambda f: (
        f"Training has been stalled for {f['seconds']:.1f} s: {as_sentence(f)}."
    ),
    FindingKind.CUT_OFF: _cut_off,
    FindingKind.NOTHING_HAPPENED: _nothing,
    FindingKind.CAUSE: _cause,
    FindingKind.CAUSE_UNKNOWN: lambda f: f"{_capital(shown(f['reason']))}.",
    FindingKind.DRIVER_BUG: lambda f: f"A bug in the driver ended the job: {shown(f['error'])}.",
    FindingKind.STORE_AWAY: _store_away,
    FindingKind.THEN: _then,
    FindingKind.AFTER_TRAINING: lambda f: (
        "Training had already succeeded: this happened in the code after it, which is not protected by"
        " commits."
    ),
    FindingKind.NOT_ELASTIC: lambda f: (
        "The job was started without --min-np, so the loss of any worker ends it."
    ),
    FindingKind.REPEATED: _repeated,
    FindingKind.TRACE: _trace,
    FindingKind.RESUMED_FROM: lambda f: f"The job resumed from {shown(start_checkpoint(f))}.",
    FindingKind.TRAINING_BEGAN: _training_began,
    FindingKind.NEVER_TRAINED: lambda f: (
        f"Training never began; {counted(f['started'], 'worker')} started."
    ),
    FindingKind.INCIDENT: _incident,
    FindingKind.SHARDED: lambda f: (
        f"The state {'was' if f['ended'] else 'is'} {sharded_sentence(f)}."
    ),
    FindingKind.ISLANDS: _islands,
    FindingKind.UNHEALTHY: _unhealthy,
    FindingKind.SLOW: _slow,
    FindingKind.MORE_SLOW: lambda f: (
        f"Later, {counted(f['count'], 'more worker')} {'was a straggler' if f['count'] == 1 else 'were stragglers'}."
    ),
    FindingKind.STALL: lambda f: (
        f"{_at(f)} Training stalled for {f['seconds']:.1f} s: {as_sentence(f)}; {ENDS[StallEnd(f['end'])]}."
    ),
    FindingKind.MORE_STALLS: lambda f: (
        f"Before that it stalled {counted(f['count'], 'time')}, for {f['seconds']:.1f} s in total."
    ),
    FindingKind.CHANGE_WAITS_NOW: lambda f: f"{because(ReasonKind.AWAITS_COMMIT, **f)}.",
    FindingKind.CHANGE_WAIT: _change_wait,
    FindingKind.MORE_CHANGE_WAITS: lambda f: (
        f"Before that workers waited {counted(f['count'], 'time')} for a commit, to join or leave."
    ),
    FindingKind.MORE_INCIDENTS: _more_incidents,
    FindingKind.REQUEST: _request,
    FindingKind.OVERDUE: lambda f: f"{_at(f)} Killed {f['worker']} ({f['leaving']}): {f['why']}.",
    FindingKind.PLANNED: _planned,
    FindingKind.CHECKPOINTS: lambda f: (
        f"{_capital(counted(f['count'], 'checkpoint'))} {'was' if f['count'] == 1 else 'were'} written;"
        f" the newest contains {_commit(f)}."
    ),
    FindingKind.DRIVERS: lambda f: f"The job had {f['drivers']} consecutive drivers.",
    FindingKind.STORE_SILENT: _store_silent,
    FindingKind.MORE_SILENCES: lambda f: (
        f"Later etcd stopped answering {counted(f['times'], 'more time')}."
    ),
    FindingKind.LOST_NOTHING: lambda f: "Nothing: no commit, and negligible time.",
    FindingKind.LOST_STEPS: _lost_steps,
    FindingKind.LOST_COMMITS: _lost_commits,
    FindingKind.LOST_ALL: _lost_all,
    FindingKind.NOT_DURABLE: lambda f: (
        f"Training ended at {_commit(f)}, which is in no checkpoint; the newest checkpoint has"
        f" {_commit(f, 'durable', 'durable_step')}."
    ),
    FindingKind.RECOVERIES: _recoveries,
    FindingKind.TIME: _time,
    FindingKind.ADVICE: _advice,
    FindingKind.LINES_LEFT_OUT: _lines_left_out,
    FindingKind.FROM_THE_MIDDLE: _from_the_middle,
    FindingKind.NOT_WRITTEN_ON: lambda f: (
        "Its driver could not write it completely (for example, because the disk was full). The "
        "job continued after the last event shown here."
    ),
}
