"""The words for what was found, in one place. Nothing is decided by them: they may be worded anew at any time. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic.driver.monitoring.explain.causes import Cause
from elastic.driver.monitoring.explain.findings import Advice, JobFinding, What
from elastic.driver.monitoring.stalls import ENDS, StallEnd, in_words
from elastic.driver.monitoring.time_spent import LEAST_S, WORDS
from elastic.driver.reasons import Why, commit_id, counted

Facts = Mapping[str, Any]
GOODPUT = "the share that was training, without what was lost"
LINE = 400  # characters of what somebody else has said
HEADINGS = {
    "ended": "",
    "advice": "What to change",
    "trace": "Where it was raised",
    "course": "What happened",
    "lost": "What was lost",
    "cost": "What it cost",
    "file": "About the journal",
}
_SECTIONS = {
    What.TRACE: "trace",
    What.TRAINING_BEGAN: "course",
    What.NEVER_TRAINED: "course",
    What.INCIDENT: "course",
    What.STALL: "course",
    What.MORE_STALLS: "course",
    What.MORE_INCIDENTS: "course",
    What.REQUEST: "course",
    What.PLANNED: "course",
    What.DRIVERS: "course",
    What.STORE_SILENT: "course",
    What.MORE_SILENCES: "course",
    What.LOST_NOTHING: "lost",
    What.LOST_STEPS: "lost",
    What.LOST_COMMITS: "lost",
    What.LOST_ALL: "lost",
    What.NOT_DURABLE: "lost",
    What.RECOVERIES: "cost",
    What.TIME: "cost",
    What.ADVICE: "advice",
    What.LINES_LEFT_OUT: "file",
    What.FROM_THE_MIDDLE: "file",
    What.NOT_WRITTEN_ON: "file",
}


def sections(found: Iterable[JobFinding]) -> dict[str, list[tuple[JobFinding, str]]]:
    """Findings with their sentences, by section: those of HEADINGS, in order."""
    told: dict[str, list[tuple[JobFinding, str]]] = {name: [] for name in HEADINGS}
    for finding in found:
        told[_SECTIONS.get(finding.what, "ended")].append((finding, sentence(finding)))
    return told


def sentence(finding: JobFinding) -> str:
    """One or a few, without a mark at the beginning; a traceback has several lines."""
    return _SENTENCES[finding.what](finding.facts)


def duration(seconds: float) -> str:
    """``3.2 s``, ``4 min 12 s``, ``2 h 3 min``."""
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
    """``58 ms``, ``3.4 s``."""
    return f"{ms:.0f} ms" if ms < 1000 else duration(ms / 1000)


def number(value: float) -> str:
    """In four digits, or all of a whole number's; with an exponent only where it is long without."""
    size = abs(float(f"{value:.4g}"))
    if size and not 1e-4 <= size < 1e7:
        return f"{value:.4g}"
    digits = 0 if value == int(value) or size >= 1000 else 3 - math.floor(math.log10(size))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shown(text: str, limit: int = LINE) -> str:
    """One line of somebody else's words."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."


# ---- who was lost, and why ------------------------------------------------------------------------------------------

_CRASHES = {
    "SIGSEGV": "it touched memory that is not its own (segmentation fault)",
    "SIGBUS": "memory behind a mapping was gone, as where /dev/shm is full",
    "SIGABRT": "a library called abort()",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an instruction that this processor does not have",
}


def _death(facts: Facts) -> str:
    """As a clause: ``rank 1 (h:1#1) raised ValueError: wrong``."""
    who, what = facts["who"], shown(facts["what"])
    match Cause(facts["cause"]):
        case Cause.EXCEPTION:
            return f"{who} raised {what}"
        case Cause.MISMATCH:
            return f"the ranks submitted tensors that do not fit together: {what}"
        case Cause.STATE_MISMATCH:
            return f"{who} was turned away: its model, optimizer or state is not that of the others"
        case Cause.MISSING_MODULE:
            return f"{who} could not import what it needs: {what}"
        case Cause.MEMORY_ERROR:
            return f"{who} got no memory from its host: {what}"
        case Cause.GPU_MEMORY:
            return f"{who} ran out of GPU memory: {what}"
        case Cause.DISK_FULL:
            return f"{who} could not write to a disk that is full (No space left on device): {what}"
        case Cause.WRITE_FAILED:
            return f"{who} could not write a file, most likely because its disk is full: {what}"
        case Cause.GPU_ERROR:
            return f"the GPU of {who} failed, or NCCL: {what}"
        case Cause.OUT_OF_MEMORY:
            limit = f" ({what}, which all processes of its cgroup share)" if what else ""
            return f"{who} ran out of memory: the kernel killed it{limit}"
        case Cause.SIGNAL if not facts["signal"]:
            return f"{who} was gone when its agent came back"
        case Cause.SIGNAL if facts["signal"] in _CRASHES:
            return f"{who} crashed with {facts['signal']}: {_CRASHES[facts['signal']]}"
        case Cause.SIGNAL:
            return f"{who} was killed with {facts['signal']} by something outside this job"
        case Cause.EXIT_CODE if facts.get("call"):
            return f"{who} called {facts['call']}"
        case Cause.EXIT_CODE:
            return f"{who} ended with exit code {facts['code']}"
        case Cause.NOT_STARTED:
            return f"{who} could not be started: {what}"
        case Cause.FROZEN:
            return f"{who} was frozen: {facts.get('how', what)}; it answered nothing, so this job killed it (SIGKILL)"
        case Cause.CUT_OFF:
            return f"{who} was cut off: its host answered nothing any more"
        case Cause.STUCK:
            doing = "idle" if facts.get("why") == Why.IDLE.value else "busy with something else"
            where = f" {facts['where']}" if facts.get("where") else ""
            where = where.replace(" in '", " in the collective '")
            for_s = f" for {float(facts['for_s']):.0f} s" if facts.get("for_s") else ""
            return f"{who} was stuck: it was {doing}{for_s} while the others waited for it{where}"
        case Cause.GPU_HANGS:
            return f"the GPU of {who} hung: {what}"
        case Cause.DAMAGED:
            return f"{who} held wrong numbers: {what}"
        case Cause.TOO_SLOW:
            return f"{who} took too long: {what}"
        case Cause.DISCONNECTED:
            return f"{who} lost its connection: {what}"
        case Cause.HOST_LOST:
            return f"host {facts['host']} was lost, and {who} with it: {what}"
        case Cause.LOST_PEER:
            return f"{who} lost its peers and could not go on: {what}"
        case Cause.SHARDS_LOST:
            return f"{who} could not go on: {what}"
        case Cause.SPOILT:
            return (
                "damaged memory of a worker, nobody knows whose, has made gradients infinite or NaN, and spoilt the"
                f" replicas of all by commit {commit_id(facts.get('commit', ''))}"
            )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cause(facts: Facts) -> str:
    if "after_store_s" in facts:
        later = duration(facts["after_store_s"])
        return f"What followed, {later} after etcd was lost: {_death(facts)}. Without etcd nobody could take its place."
    return f"{_capital(_death(facts))}."


# ---- how it ended ---------------------------------------------------------------------------------------------------


def _done(facts: Facts) -> str:
    commit = f", at commit {facts['commit']}" if facts["commit"] else ""
    if facts.get("short"):
        return f"The job ended after {duration(facts['after_s'])}{commit}: {shown(facts['short'])}."
    return f"The job ended well after {duration(facts['after_s'])}{commit}."


def _runs(facts: Facts) -> str:
    return (
        f"The job runs: {counted(facts['workers'], 'worker')} in the present world, {duration(facts['after_s'])} since"
        " its start."
    )


def _cut_off(facts: Facts) -> str:
    if facts["abandoned"]:
        return (
            f"The journal ends in the middle of the job, after {duration(facts['after_s'])}: its driver could not write"
            " it any further, as on a full disk, and the job went on."
        )
    if "after_store_s" in facts:
        return (
            f"The journal ends {duration(facts['after_store_s'])} after etcd was lost, in the middle of the job: its"
            " driver was killed, or its machine went down, or this is a copy of a journal that is still being written."
        )
    return (
        f"The journal ends in the middle of the job, after {duration(facts['after_s'])}: its driver was killed, or its"
        " machine went down, or its disk was full, or this is a copy of a journal that is still being written."
    )


def _nothing(facts: Facts) -> str:
    why = (
        "it has only just begun"
        if facts["runs"]
        else "the job's driver ended before anything began"
    )
    return f"The journal has no events: {why}."


def _store_away(facts: Facts) -> str:
    return (
        f"The job lost etcd, without which its driver can decide nothing: etcd at {facts['store']} stopped answering"
        f" {duration(facts['at_s'])} after the start ({facts['text']}), and did not come back."
    )


def _then(facts: Facts) -> str:
    match facts["kind"]:
        case Why.SAME_EXCEPTION.value:
            return (
                f"{facts['first']} and {facts['worker']} raised the same exception, both when training had come to"
                f" commit {commit_id(facts['commit'])}: every worker that goes on from there would raise it, so the job"
                " ended."
            )
        case Why.SCRIPT_FAILS.value:
            return "Every worker ended before training began, so the job ended."
        case Why.SLOTS_SPENT.value:
            attempts = counted(facts["attempts"], "attempt")
            return f"Every slot was given up after {attempts}; {counted(facts['needed'], 'worker')} needed."
        case Why.RESET_LIMIT.value:
            return f"--reset-limit {facts['limit']} allows no more failures, so the job ended."
        case Why.RESTARTS_SPENT.value:
            return f"--restarts {facts['limit']} allows no more restarts from a checkpoint, so the job ended."
        case Why.ALL_LOST.value:
            members = counted(facts["members"], "worker")
            return f"All {members} of generation {facts['generation']} were lost: nobody was left to go on from."
        case Why.NO_COMMIT.value:
            return "No survivor held a commit, so there was nothing to go on from."
        case Why.STUCK_AGAIN.value:
            worlds = counted(facts["worlds"], "world")
            return (
                f"In each of the last {worlds} a worker was stuck, and no step was committed in between, so the job was"
                " ended."
            )
        case Why.IN_CIRCLES.value:
            return f"{facts['worlds']} worlds in a row broke with no new commit between, so the job ended."
        case Why.TOO_FEW.value:
            needed = counted(facts["needed"], "worker")
            return (
                f"The job needs at least {needed}: it had {facts['ready']}, waited {facts['within_s']:g} s for more,"
                " and gave up."
            )
        case _:
            return f"The driver's reason for the end: {shown(facts['text'])}."


def _repeated(facts: Facts) -> str:
    same = f", each of them as rank {facts['rank']}" if facts.get("rank") is not None else ""
    return f"{facts['times']} workers were lost in this way in the whole job{same}."


def _trace(facts: Facts) -> str:
    return f"The traceback of {facts['who']}:\n" + str(facts["text"])


# ---- what happened --------------------------------------------------------------------------------------------------


def _training_began(facts: Facts) -> str:
    what, since, in_all = "began", "", " in all"
    if facts["before"]:  # a copy that begins in the middle
        what, since, in_all = "went on", " since then", ""
    return (
        f"{_at(facts)} Training {what}; the largest world{since} had {counted(facts['largest'], 'worker')},"
        f" on {counted(facts['hosts'], 'host')}"
        f" ({counted(facts['started'], 'process').replace('processs', 'processes')} started{in_all})."
    )


def _at(facts: Facts) -> str:
    return f"+{duration(facts['at_s'])}:"


def _incident(facts: Facts) -> str:
    first = facts.get("first")
    if first is None:
        lead = f"The world broke: {shown(facts['broke'])}" if facts["broke"] else "The world broke"
    else:
        lead = _capital(_death(first))
    return f"{_at(facts)} {lead}.{_others(facts)} {_after(facts)}".rstrip()


def _others(facts: Facts) -> str:
    others = facts.get("others") or []
    first, spoilt = facts.get("first") or {}, ""
    if facts["spoilt"] and first.get("cause") == Cause.DAMAGED.value:
        spoilt = " Its gradients had spoilt the replicas of all others too."
    if not others:
        return spoilt
    count = len(others) + facts["more"]
    alike = {each["cause"] for each in others} == {facts["first"]["cause"]}
    if alike:
        names = ", ".join(each["who"].removeprefix("worker ") for each in others)
        return f"{spoilt} The same happened to {names}{' and others' if facts['more'] else ''}."
    told = "; ".join(_death(each) for each in others[:3])
    more = f"; and {count - 3} more" if count > 3 else ""
    return f"{spoilt} Then {told}{more}."


def _after(facts: Facts) -> str:
    """What became of the others."""
    if facts["ended"]:
        later = facts["ended_after_s"]
        return f"The job ended {duration(later)} later." if later >= 0.1 else "The job ended."
    if facts["recovered_ms"] is None:
        size = facts["size_after"]
        if size is None:
            return "" if facts["broke"] or not facts["size"] else "Nobody else was disturbed."
        begun = ", begun anew from a checkpoint" if facts["from_checkpoint"] else ""
        return f"{counted(size, 'worker')} formed a new world{begun}."
    held = f" from commit {facts['commit']}" if facts["commit"] else ""
    if facts["from_checkpoint"]:
        why = (
            "commits in memory were spoilt"
            if facts["spoilt"]
            else "no whole commit was left in memory"
        )
        held = f" from {_checkpoint(facts)}, as {why}"
    size = facts["size_after"]
    who = counted(size, "worker") if size else "The others"
    copied = facts["copied_bytes"] / 1e6
    much = f", {copied:.1f} MB copied to newcomers" if copied >= 0.1 else ""
    return f"{who} trained on {milliseconds(facts['recovered_ms'])} later{held}{much}."


def _checkpoint(facts: Facts) -> str:
    return f"the checkpoint of commit {facts['commit']}" if facts["commit"] else "a checkpoint"


def _request(facts: Facts) -> str:
    match facts["kind"]:
        case "scale":
            wish = f"the job to have {counted(facts['workers'], 'worker')}"
        case "drain":
            wish = f"no worker on host {facts['host']}"
        case "drain off":
            wish = f"workers on host {facts['host']} again"
        case "remove":
            wish = f"worker {facts['worker']} to leave"
        case _:
            wish = "something that this version does not know"
    return (
        f"{_at(facts)} An operator wanted {wish}{'' if facts['done'] else ', which was refused'}."
    )


def _store_silent(facts: Facts) -> str:
    back = facts["back_after_s"]
    then = "did not come back" if back is None else f"answered again {duration(back)} later"
    return f"{_at(facts)} etcd at {facts['store']} stopped answering ({shown(facts['text'])}), and {then}."


def _more_incidents(facts: Facts) -> str:
    causes = ", ".join(f"{count} x {cause}" for cause, count in list(facts["causes"].items())[:6])
    return f"... {facts['count']} more incidents in between" + (f": {causes}." if causes else ".")


def _planned(facts: Facts) -> str:
    count = facts["count"]
    times = "once" if count == 1 else f"{count} times"
    return (
        f"The world changed as planned {times}, as workers joined or left; the longest change took"
        f" {milliseconds(facts['longest_ms'])}."
    )


# ---- lost, spent ----------------------------------------------------------------------------------------------------


def _lost_steps(facts: Facts) -> str:
    return (
        f"{duration(facts['lost_s'])} of training, added up over all workers: what each had done since the last commit"
        " when a worker was lost."
    )


def _lost_commits(facts: Facts) -> str:
    times = "Once" if facts["times"] == 1 else f"{facts['times']} times"
    if facts["spoilt"]:
        why = "damaged memory of a worker had spoilt the newer ones"
    elif facts["from_checkpoint"]:
        why = "that of the newest checkpoint, as nobody held a newer one any more"
    else:
        why = "who held the newer one was lost"
    return (
        f"{times} training went on from an older commit than the newest ({facts['commit']} and not {facts['newest']}):"
        f" {why}."
    )


def _lost_all(facts: Facts) -> str:
    upto = f"up to commit {facts['commit']},"
    if facts["checkpoints"]:
        return (
            f"What was trained {upto} was in the memory of the workers; the newest of"
            f" {counted(facts['checkpoints'], 'checkpoint')} can be gone on from."
        )
    return (
        f"All that was trained, {upto} was in the memory of the workers, which have ended. Files that the script wrote"
        " itself are still there."
    )


def _recoveries(facts: Facts) -> str:
    count, longest = facts["count"], milliseconds(facts["longest_ms"])
    if count == 1:
        return f"From the loss to the next step of all: {longest}."
    middle = milliseconds(facts["median_ms"])
    return f"From a loss to the next step of all: {middle} (the middle of {count}), {longest} at worst."


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
    "stalled": "nothing was trained, as ranks waited for another one",
    "storage": "reading a checkpoint, or waiting for one",
    "recovering": "from the end of a world until the next one trains",
    "joining": "from its start until it trains, and while others join or leave",
    "lost": "was to be trained again",
    "idle": "after its training, until its exit",
}


def parts_meant(facts: Facts) -> str:
    """What those parts of the workers' time are that are not plain, and that somebody had; empty: none."""
    had = [name for name in _MEANT if facts["workers"][name] >= LEAST_S]
    return "; ".join(f"{name}: {_MEANT[name]}" for name in had)


def _lines_left_out(facts: Facts) -> str:
    told = []
    if facts["count"]:
        told.append(f"{counted(facts['count'], 'line')} could not be read, and left out here")
    if facts["torn"]:
        told.append("the last line is cut off, as after a crash or in a copy")
    return _capital("; ".join(told)) + "."


# ---- what to change -------------------------------------------------------------------------------------------------


_GOES_ON = "from what its workers hold if they still train, and else from the newest checkpoint, if it makes any"


# Of the facts of a finding, worded for a format.
_ADVICE = {
    Advice.MORE_MEMORY: (
        "Give the workers of {host} more memory, start fewer of them there, or have each hold less: a smaller"
        " batch, fewer DataLoader workers, fewer tensors kept from step to step."
    ),
    Advice.LESS_GPU_MEMORY: (
        "Have each worker hold less on its GPU: a smaller batch, activation checkpointing, or fewer tensors kept from"
        " step to step. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragmentation."
    ),
    Advice.FREE_DISK: (
        "Make room on {host} on the disk that the script writes to in the traceback's last line of its own, or"
        " write elsewhere."
    ),
    Advice.SAME_CALLS: (
        "Have all ranks make the same collective calls, with tensors of the same shapes and dtypes. A rank that"
        " has fewer batches than the others calls join() at its end."
    ),
    Advice.SAME_STATE: (
        "Have every worker build the same model, optimizer and state: the log shows the first difference, in"
        " both texts."
    ),
    Advice.MEND_SCRIPT: "Mend the script, or its data, where the traceback says; it was not the cluster's fault.",
    Advice.INSTALL: (
        "Check the name; install what is missing in the Python that runs the workers on {host}, or put its"
        " folder into PYTHONPATH."
    ),
    Advice.MEND_START: "Try the command by hand on {host}: the program, its path and its permissions.",
    Advice.TEST_GPU: (
        "Look for the GPU's errors on {host} (nvidia-smi -q, Xid lines in dmesg), and leave it out of the"
        " list of hosts until it is tested."
    ),
    Advice.TEST_HOST: "Have the memory and the processor of {host} tested, and leave it out until then.",
    Advice.TEST_HOSTS: (
        "Have the memory and the processors of all hosts tested: whose bits have changed could not be told."
    ),
    Advice.LOOK_AT_LINE: (
        "Look at what {who} does. While it lasts, `elasticrun stacks {rank}` shows where it is. If the pause is"
        ' intended, put it into `with elastic.long_phase("evaluate"):`.'
    ),
    Advice.LOOK_AT_STACKS: (
        "Look at the stacks of {who} in the log: they were written before it was killed. If the pause is"
        ' intended, put it into `with elastic.long_phase("evaluate"):`.'
    ),
    Advice.WHO_FROZE_IT: (
        "Find out who stopped {who} on {host}: SIGSTOP by a person or a debugger, a frozen container, a"
        " suspended machine. A longer --lease tolerates longer stops."
    ),
    Advice.LOOK_AT_NETWORK: "Look at the network of {host}, and whether the machine itself stood still.",
    Advice.WHO_KILLED_IT: (
        "Find out who killed {who} on {host} ({seen}): look in dmesg, in the system's log, and in what your batch"
        " system or container runtime says. The kernel did not report that memory ran out."
    ),
    Advice.MORE_COPIES: (
        "Raise copies of elastic.TorchState: as many workers on different hosts as there are copies of each shard can"
        " be lost at once."
    ),
    Advice.CRASH: (
        "{signal} is a crash in native code: a library that does not fit, or a bug of an extension. Run the"
        " script with PYTHONFAULTHANDLER=1 to see where."
    ),
    Advice.SHARED_MEMORY: (
        "Give /dev/shm on {host} more room (in a container: --shm-size), or use fewer DataLoader workers."
    ),
    Advice.LOOK_AT_HOST: "See whether {host} is up, whether its agent runs, and whether it reaches the driver.",
    Advice.START_TIMEOUT: "Give a slow start more time by --start-timeout, or do less before hvd.init().",
    Advice.BE_ELASTIC: (
        "Let the job survive a lost worker: start it with --min-np, with the training loop in a function under"
        " @elastic.run."
    ),
    Advice.FEWER_NEEDED: (
        "Have the job go on with fewer than {workers} (--min-np), or start more"
        " hosts, keep spares by --standbys, or wait longer by --elastic-timeout."
    ),
    Advice.RESET_LIMIT: "Raise --reset-limit (it is {limit}), or leave it out.",
    Advice.CHECKPOINTS: "With --checkpoint-dir, commits outlive all workers, and the job goes on from the newest.",
    Advice.COMMIT_MORE_OFTEN: (
        "{share:.0%} of the workers' time was done again, with {committed}: commit more often, after every step at"
        " most."
    ),
    Advice.PRELOAD: (
        "{share:.0%} of the workers' time was spent on imports and joining. If --preload auto finds no"
        " imports (elasticrun docs spot), name the modules: --preload torch."
    ),
    Advice.STANDBYS: "--standbys 1 keeps a worker ready to take the place of a lost one at once.",
    Advice.ETCD: (
        "Bring etcd at {store} back, and run several members of it. The same command with --resume"
        " then goes on with the job, {goes_on}."
    ),
    Advice.REPORT_BUG: "Please report the bug, with this journal.",
    Advice.RESUME: "The same command goes on with the job if it had --resume, {goes_on}.",
    Advice.LOOK_AT_EXIT: "Look at what {who} wrote last: the script, or a library, ended it without an exception.",
}


def _advice(facts: Facts) -> str:
    worded = {
        **facts,
        "seen": facts.get("signal") or "its end was not seen",
        "workers": counted(facts["needed"], "worker") if "needed" in facts else "",
        "goes_on": _GOES_ON,
        "committed": f"a commit every {duration(facts['every_s'])}"
        if facts.get("commits")
        else "no commit",
    }
    return _ADVICE[Advice(facts["advice"])].format_map(worded)


_SENTENCES: dict[What, Callable[[Facts], str]] = {
    What.DONE: _done,
    What.FAILED: lambda f: (
        f"The job failed after {duration(f['after_s'])}, with exit code {f['code']}."
    ),
    What.STOPPED: lambda f: (
        f"The job was stopped after {duration(f['after_s'])}: {shown(f['by'])}."
    ),
    What.RUNS: _runs,
    What.STALLS_NOW: lambda f: f"Training is stalled, for {f['seconds']:.1f} s now: {in_words(f)}.",
    What.CUT_OFF: _cut_off,
    What.NOTHING_HAPPENED: _nothing,
    What.CAUSE: _cause,
    What.CAUSE_UNKNOWN: lambda f: f"{_capital(shown(f['reason']))}.",
    What.DRIVER_BUG: lambda f: f"A bug in the driver ended it: {shown(f['error'])}.",
    What.STORE_AWAY: _store_away,
    What.THEN: _then,
    What.AFTER_TRAINING: lambda f: (
        "Training had succeeded by then: this came in the code that runs after it, which no commit protects."
    ),
    What.NOT_ELASTIC: lambda f: (
        "The job was started without --min-np, so the loss of any worker ends it."
    ),
    What.REPEATED: _repeated,
    What.TRACE: _trace,
    What.TRAINING_BEGAN: _training_began,
    What.NEVER_TRAINED: lambda f: (
        f"Training never began; {counted(f['started'], 'worker')} started."
    ),
    What.INCIDENT: _incident,
    What.STALL: lambda f: (
        f"{_at(f)} Training stalled for {f['seconds']:.1f} s: {in_words(f)}; {ENDS[StallEnd(f['end'])]}."
    ),
    What.MORE_STALLS: lambda f: (
        f"Before that it stalled {f['count']} times, for {f['seconds']:.1f} s in all."
    ),
    What.MORE_INCIDENTS: _more_incidents,
    What.REQUEST: _request,
    What.PLANNED: _planned,
    What.DRIVERS: lambda f: f"{f['drivers']} drivers led the job, one after the other.",
    What.STORE_SILENT: _store_silent,
    What.MORE_SILENCES: lambda f: f"Later etcd did not answer for a while {f['times']} times more.",
    What.LOST_NOTHING: lambda f: "Nothing: no commit, and no time worth a word.",
    What.LOST_STEPS: _lost_steps,
    What.LOST_COMMITS: _lost_commits,
    What.LOST_ALL: _lost_all,
    What.NOT_DURABLE: lambda f: (
        f"The last commit, {f['commit']}, is in no checkpoint: the newest has {f['durable']}."
    ),
    What.RECOVERIES: _recoveries,
    What.TIME: _time,
    What.ADVICE: _advice,
    What.LINES_LEFT_OUT: _lines_left_out,
    What.FROM_THE_MIDDLE: lambda f: (
        "This copy begins in the middle of the job: what was before is not in it."
    ),
    What.NOT_WRITTEN_ON: lambda f: (
        "Its driver could not write it to its end, as on a full disk: the job went on after what is told here."
    ),
}
