"""Detection of workers that all other workers wait for, and the decision to ignore, log or fence each of them.

Deterministic. A member sends a report when it has been inside a collective for one second. While some members are
inside a collective, ready, or have returned, the other members are suspects and their processes are probed. `suspicion`
judges the results. If all members are inside collectives, but not the same one, the script is at fault: no worker is
fenced, and the log shows where each worker waits.

`unresponsive_hosts` checks earlier whether the hosts of the suspects respond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic.driver import events
from elastic.driver.membership.failure_detection.gpu_hangs import (
    HangFinding,
    RankReport,
    hang_of_all,
    hang_of_one,
    judge,
)
from elastic.driver.membership.failure_detection.idle_world import NAMED as NAMED_LINES
from elastic.driver.membership.failure_detection.idle_world import IdleWorld
from elastic.driver.membership.failure_detection.stragglers import Stragglers
from elastic.driver.membership.failure_detection.suspicion import (
    Next,
    Suspicion,
    Suspicions,
    probe_every_s,
)
from elastic.driver.membership.failure_detection.unresponsive_hosts import UnresponsiveHosts
from elastic.driver.membership.records.roster import WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Phase, Worlds
from elastic.driver.reasons import ReasonKind, because, counted
from elastic.protocol.calls import Called
from elastic.protocol.messages import COPY, GRADIENTS, SHARDS_COMMIT, Launches, Worker

SOON_S = 0.001
# Seconds that all members must have waited for each other before the cause is examined.
ALL_INSIDE_S = 30.0
SILENT_S = 15.0  # seconds; three times the interval at which a waiting worker repeats its report
OUTSIDE = "elastic.run has not begun yet: until it begins, a lost worker can end the job"
NAMED = 4  # maximum number of workers that get a log line of their own in one check


class Stuck(Part):
    """Monitor of members that other members wait for."""

    def __init__(self, worlds: Worlds) -> None:
        super().__init__(worlds)
        self._suspicions = Suspicions(self.settings)
        self._stragglers = Stragglers(factor=self.settings.straggler_factor)
        self._silence = UnresponsiveHosts(self.settings.silence_s)
        self._probe_s = probe_every_s(self.settings)
        self._look_at: float | None = None  # time of the next check, or None if no worker waits
        self._repeated_at = 0.0  # time of the last repeated report from a waiting worker
        self._watched = 0  # generation to which the collected data belongs
        self._where = ""  # collective or script line at which the other workers wait
        self._lines = NAMED  # number of log lines that may still be written before the next check
        self._unnamed = 0  # number of suspects without a log line
        self._all_inside_said = ""
        self._idle = IdleWorld()
        # whether the check for a missing elastic.run was made, at the first report of collectives
        self._warned_outside = False
        # Latest time at which other members waited for a suspect.
        self._stalled_at: float | None = None

    @property
    def stragglers(self) -> frozenset[Worker]:
        """Workers that make progress but are slower than the others."""
        return self._stragglers.named

    # ---- reports ---------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> bool:
        """Handle an event about a worker's progress or its process. Return False for other events."""
        match event:
            case events.WorkerProgressed():
                self.progressed(event)
            case events.WorkerLocated():
                self.located(event)
            case events.WorkerPaced():
                self.paced(event)
            case events.WorkerProbed():
                self.probed(event)
            case _:
                return False
        return True

    def progressed(self, event: events.WorkerProgressed) -> None:
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        if record.stage is not WorkerStage.MEMBER or record.killed_for:
            return
        before = (record.entered, record.phase, record.inside)
        self._silence.answered(event.worker.host)
        record.said_at = self.actions.now
        self._record_gpu(record, event)
        if event.inside and before == (event.entered, event.phase, event.inside):
            self._repeated_at = self.actions.now
        if event.inside:
            record.inside = record.last_inside = event.inside
            record.waits_since = self.actions.now - event.waited_s
        elif before != (event.entered, event.phase, ""):
            record.moved(self.actions.now)
        record.entered, record.phase, record.line = event.entered, event.phase, event.line
        if before != (event.entered, event.phase, event.inside):
            self._record_progress(record)

    def located(self, event: events.WorkerLocated) -> None:
        self.worlds.signs.answered(event.worker)
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        record.line = event.line
        place = self.worlds.world.places.get(event.worker)
        suspected = self._suspicions.get(event.worker) is not None
        if suspected and place is not None and event.line and len(self._suspicions) <= NAMED:
            waiters = [each.worker for each in self.roster.inside.values()]
            self.actions.add(events.TellAwaited(event.generation, waiters, place.rank, event.line))

    def _record_gpu(self, record: WorkerRecord, event: events.WorkerProgressed) -> None:
        """Record a worker's GPU progress, and when it last changed. A new wait in a collective counts as a change."""
        same_wait = (record.entered, record.inside) == (event.entered, event.inside)
        if not same_wait or _counts(record.gpu) != _counts(event.gpu):
            record.gpu_since = self.actions.now
        record.gpu = event.gpu

    def paced(self, event: events.WorkerPaced) -> None:
        record = self.roster.get(event.worker)
        if record is None or event.generation != self.worlds.generation:
            return
        if record.stage is not WorkerStage.MEMBER or record.killed_for:
            return
        if event.collectives and self.settings.elastic and not self._warned_outside:
            self._warned_outside = True
            if not self.worlds.trained:
                self.actions.log("warning", OUTSIDE)
        suspicion = self._suspicions.get(event.worker)
        since = self.actions.now - event.over_s
        if event.collectives and suspicion is not None and since >= suspicion.since:
            # The other workers wait in a collective of a process group that does not contain this worker.
            record.moved_at = max(since, record.moved_at)
            self._record_progress(record)
        if steps := max(event.collectives, event.commits):
            idle_s = self._idle.completed(steps, event.over_s, self.actions.now)
            if idle_s is not None:
                self.actions.log("info", f"training continued after {idle_s:.0f} s without a step")
        if self._stalled_at is not None and since < self._stalled_at:
            return  # The stall that was already detected explains this wait.
        if self._stragglers.size == 0:
            self._stragglers.size = len(self.worlds.members)
        if record.phase:
            return  # In a phase marked as long, the other workers are expected to wait.
        before = self._stragglers.named
        if self._stragglers.paced(event.worker, event.waited_s, event.over_s):
            level = "warning" if self._stragglers.named else "info"
            slow = {str(w): self._stragglers.speed(w) for w in sorted(self._stragglers.named)}
            about = because(
                ReasonKind.STRAGGLERS,
                workers=", ".join(slow),
                speeds=", ".join(f"{speed:.2f}" for speed in slow.values()),
                over=", ".join(str(w) for w in sorted(before - self._stragglers.named)),
            )
            self.actions.log(level, self._stragglers.sentence(self._name_of), about)
        self._replace_straggler()

    def _replace_straggler(self) -> None:
        """Replace the slowest persistent straggler in a planned change, if a standby is ready."""
        if not self.settings.replace_stragglers or self.worlds.phase is not Phase.TRAINING:
            return
        if self.roster.leavers or not self.worlds.joining():
            return
        for worker in self._stragglers.lasting()[:1]:
            record = self.roster[worker]
            speed = self._stragglers.speed(worker)
            why = because(ReasonKind.REPLACED, speed=speed)
            text = f"{self._name_of(worker)} is replaced by a standby: {why}"
            self.actions.log("warning", text, why)
            self.staff.leave(record, why, self.worlds.world.places)

    def probed(self, event: events.WorkerProbed) -> None:
        if self._silence.answered(event.worker.host):
            return
        suspicion = self._suspicions.get(event.worker)
        record = None if suspicion is None else self._still(suspicion)
        if suspicion is None or record is None:
            return
        suspicion.probed(event, self.actions.now)
        self._judge(suspicion, record)
        due = suspicion.fence_due(self.settings)
        if due is not None and self._look_at is not None and due > self.actions.now:
            self._look_at = min(self._look_at, due)

    # ---- after each event ------------------------------------------------------------------------------------------

    def deadlines(self) -> Iterator[float | None]:
        yield self._look_at
        yield self._silence.look_at
        if self.worlds.phase is Phase.TRAINING:
            yield self._idle.due
        yield self._suspicions.next_fence()

    def watch(self) -> None:
        """Check each member that makes others wait for longer than the limit. Must be called after every event."""
        if self._watched != self.worlds.generation:
            self._watched = self.worlds.generation
            self._stragglers = Stragglers(factor=self.settings.straggler_factor)
            self._silence.end()
            self._forget()
            self._idle.begin(self.actions.now)
        self._watch_idle()
        self._ask_hosts()
        if not self._must_watch():
            self._forget()
            return
        for suspicion in self._suspicions.to_fence(self.actions.now):
            record = self._still(suspicion)
            if record is not None:
                reason = suspicion.reason(self.actions.now, self._where)
                self.worlds.give_up.was_stuck(self.worlds.generation)
                self.staff.fence(record, reason)
        if self._look_at is None:
            first = next(iter(self.roster.inside.values()), None)
            since = self.actions.now if first is None else first.waits_since
            self._look_at = since + self._probe_s
        if self._look_at <= self.actions.now:
            self._look()
            if not self._must_watch():  # _look() has ended the world.
                self._forget()

    def _still(self, suspicion: Suspicion) -> WorkerRecord | None:
        record = self.roster.get(suspicion.worker)
        if record is None or record.killed_for or record.moved_at > suspicion.since:
            return None
        return record

    def _forget(self) -> None:
        self._look_at = None
        self._all_inside_said = ""
        if self._suspicions:
            self._suspicions.only(())

    def _record_progress(self, record: WorkerRecord) -> None:
        if self._suspicions.drop(record.worker):
            self._stalled_at = self.actions.now
            text = f"{self.worlds.named(record)} made progress, so it is not fenced"
            self.actions.log("info", text)

    def _watch_idle(self) -> None:
        """Log the members' script lines if no member waits but none has completed a step for a long time."""
        if self.worlds.phase is not Phase.TRAINING or not self.actions.expired(self._idle.due):
            return
        now = self.actions.now
        places = self.worlds.world.places
        records = [each for each in self.worlds.live() if each.worker in places]
        busy = self.roster.inside or any(each.phase for each in records)
        if busy or not self.settings.busy_warning_s or not self.worlds.world.running or not records:
            self._idle.begin(now)
        elif not self._idle.asked:
            self._idle.ask(now)
            self.actions.add(events.ProbeWorkers([each.worker for each in records[:NAMED_LINES]]))
        else:
            lines = [(places[each.worker].rank, each.line) for each in records]
            self.actions.log("warning", self._idle.sentence(sorted(lines), now))

    def _ask_hosts(self) -> None:
        """Query each host on which all workers are suspects. A host whose agent does not respond is treated as lost."""
        if not self.settings.silence_s:
            return
        if self.worlds.phase is Phase.ENDING or not self._any_waiting():
            self._silence.end()
            return
        now = self.actions.now
        if self._silence.look_at is None:
            first = next(iter(self.roster.inside.values()), None)
            self._silence.begin(now if first is None else first.waits_since, now)
        if not self.actions.expired(self._silence.look_at):
            return
        for_s, silent = self._silence.for_s(now), self._silence.silent(now)
        waiters, suspects = self._sides()
        speak = {each.worker.host for each in waiters}
        hosts = {s.worker.host: s.worker for s in suspects if s.worker.host not in speak}
        if silent and all(s.worker.host in silent & hosts.keys() and not s.phase for s in suspects):
            for host in sorted(hosts):
                self.actions.add(
                    events.GiveUpHost(host, because(ReasonKind.HOST_SILENT, for_s=for_s))
                )
        elif self._silence.ask(hosts, now) and hosts:
            self.actions.add(events.ProbeWorkers([*hosts.values()]))

    def _must_watch(self) -> bool:
        limits = (self.settings.idle_s, self.settings.busy_s, self.settings.busy_warning_s)
        return any(limits) and self._any_waiting()

    def _any_waiting(self) -> bool:
        """Return whether any worker waits in a collective.

        This is called after every event, so it uses only a fast, approximate test. `_look` checks the details.
        """
        match self.worlds.phase:
            case Phase.TRAINING | Phase.PREPARING:
                return bool(self.roster.inside)
            case Phase.GATHERING:
                at_work = self.roster.any_at(WorkerStage.MEMBER, WorkerStage.RETURNED)
                return (
                    bool(self.worlds.generation)
                    and at_work
                    and self.roster.any_at(WorkerStage.READY)
                )
            case Phase.STOPPING:
                return self.roster.any_at(WorkerStage.READY) or bool(self.roster.inside)
            case Phase.ENDING:
                return True
        return False

    def _look(self) -> None:
        now = self.actions.now
        self._look_at = now + self._probe_s
        if self._unnamed:
            more = counted(self._unnamed, "more member")
            self.actions.log("warning", f"{more} kept the others waiting {self._where}")
        self._lines, self._unnamed = NAMED, 0
        self._discard_silent_waits()
        waiters, suspects = self._sides()
        finding = next(self._hangs(), None)
        if finding is not None:
            self._hung(finding)
            return
        if not waiters or not suspects:
            self._suspicions.only(())
            self._all_inside(waiters)
            return
        self._all_inside_said = ""
        first = min(waiters, key=lambda s: s.waits_since)
        since = first.waits_since
        if now - since < self._probe_s:
            self._look_at = max(since + self._probe_s, now + SOON_S)
            return
        self._where = self._place_of_wait(first)
        busy_too = self.worlds.phase is not Phase.ENDING or bool(self.roster.inside)
        # In a world formed by init(), before elastic.run, a fence would end the job, and the script may still be
        # preparing its data.
        patient = self.settings.elastic and not self.worlds.world.running
        patient = patient and self.worlds.phase is not Phase.GATHERING
        new = [
            Suspicion(s.worker, max(since, s.moved_at), s.phase, busy_too, patient)
            for s in suspects
        ]
        to_probe: list[Worker] = []
        for suspicion in self._suspicions.only(new):
            if suspicion.phase:
                due = suspicion.since + self._probe_s
                if now >= due:
                    self._judge(suspicion, self.roster[suspicion.worker])
                else:
                    self._look_at = min(self._look_at, due)
            elif suspicion.fence_at is None:
                to_probe.append(suspicion.worker)
        self._stalled_at = now
        if to_probe:
            self.actions.add(events.ProbeWorkers(to_probe))

    def _discard_silent_waits(self) -> None:
        for record in [*self.roster.inside.values()]:
            if record.said_at < self._repeated_at - SILENT_S:
                record.inside = ""

    def _sides(self) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        gathering = self.worlds.phase is Phase.GATHERING
        places = self.worlds.world.places
        waiters: list[WorkerRecord] = []
        suspects: list[WorkerRecord] = []
        for record in self.roster.first_at(
            WorkerStage.MEMBER, WorkerStage.RETURNED, WorkerStage.READY
        ):
            if record.killed_for or record.worker not in places:
                continue
            if record.stage is WorkerStage.READY:
                waiters.append(record)
            elif gathering:
                # Members inside a collective leave it when it is aborted, after elastic_timeout_s at the latest.
                if not record.inside and self.worlds.awaited(record):
                    suspects.append(record)
            elif record.inside or record.stage is WorkerStage.RETURNED:
                waiters.append(record)
            else:
                suspects.append(record)
        return waiters, suspects

    def _place_of_wait(self, first: WorkerRecord) -> str:
        match self.worlds.phase:
            case Phase.GATHERING:
                return "for the next world"
            case _ if first.inside:
                return f"in {first.inside!r}{_at([first])}"
            case Phase.STOPPING:
                return "at a safepoint"
        return "at the end of training"

    def _judge(self, suspicion: Suspicion, record: WorkerRecord) -> None:
        now = self.actions.now
        match self._suspicions.judge(suspicion, now):
            case Next.NAME if self._lines > 0:
                self._lines -= 1
                last = (
                    f"in no collective now, last waited in {record.last_inside!r}"
                    if record.last_inside
                    else "in no collective"
                )
                held = f"keeps the others waiting {self._where} for {now - suspicion.since:.0f} s"
                what, end = suspicion.describe(self.settings, now)
                what += f" at {record.line}" if record.line else ""
                text = f"{self.worlds.named(record)} {held}: {what}, {last}"
                self.actions.log("warning", f"{text}; {end}" if end else text)
            case Next.NAME:
                self._unnamed += 1
            case Next.CONDEMN:
                reason = suspicion.reason(now, self._where)
                self.actions.add(events.DumpStacks(record.worker, reason))
            case _:
                pass

    def restarted(self) -> None:
        """Discard all recorded waits after a driver restart."""
        self._silence = UnresponsiveHosts(self.settings.silence_s)
        self._forget()
        for record in self.roster.values():
            record.waits_since = record.moved_at = record.gpu_since = self.actions.now

    def check(self) -> None:
        """Assert the invariants of the suspicions. Tests call this method after every event."""
        for record in self.roster.inside.values():
            assert record.stage is WorkerStage.MEMBER and record.inside and not record.killed_for
        assert self.worlds.over or (self._look_at is not None) == self._must_watch()
        self._suspicions.check()

    # ---- all wait --------------------------------------------------------------------------------------------------

    def _all_inside(self, waiters: list[WorkerRecord]) -> None:
        limit_s = min(self.settings.idle_s, ALL_INSIDE_S)
        if limit_s <= 0 or not self.roster.inside:
            return
        inside = [s for s in waiters if s.inside]
        if not inside or any(s.killed_for for s in self.worlds.live()):
            return  # A member is already being killed. Its exit will end the wait.
        due = max(s.waits_since for s in waiters) + limit_s
        if self.actions.now < due:
            self._look_at = min(self.actions.now + self._probe_s, due)
            return
        if self.worlds.completed and not any(s.running for s in inside):
            early = ", ".join(self.worlds.completed[:8])
            uneven = because(ReasonKind.UNEVEN, where=self._where_all(inside), for_s=limit_s)
            self.worlds.end(1, because(ReasonKind.ENDED_EARLY, workers=early, cause=uneven))
        returned = [s for s in waiters if s.stage is WorkerStage.RETURNED]
        if returned and self.worlds.phase is Phase.ENDING:
            names = self._names(returned)
            where = self._where_all(inside)
            self.worlds.end(
                1, because(ReasonKind.RETURNED_ALONE, who=names, for_s=limit_s, where=where)
            )
        if self.worlds.phase not in (Phase.TRAINING, Phase.PREPARING):
            return
        text = self._where_all(inside)
        if text == self._all_inside_said:
            return
        self._all_inside_said = text
        groups = {(s.inside, s.entered) for s in inside}
        copying = any(s.inside == COPY for s in inside)
        if len(groups) > 1 and copying:
            self.actions.log(
                "warning", f"{text} for {limit_s:g} s; either the copy is very large or it hangs"
            )
        elif len(groups) > 1:
            called = {s.inside for s in inside}
            committing = SHARDS_COMMIT in called and len(called) > 1
            kind = (
                ReasonKind.COMMIT_ON_SOME_RANKS if committing else ReasonKind.DIFFERENT_COLLECTIVES
            )
            wrong = because(kind, for_s=limit_s, where=text)
            self.actions.log("error", str(wrong))
            if len(called) == 1:
                # Different numbers of entered collectives alone do not prove that the calls differ.
                return
            if not self.settings.elastic:
                self.worlds.end(1, wrong)
            calls = [Called(0, s.inside, s.line) for s in inside]
            again = self.worlds.mismatches.repeats(self.worlds.generation, calls)
            if again and self.settings.judge_scripts:
                self.worlds.end(1, because(ReasonKind.SAME_CALLS, cause=wrong))
            self.worlds.break_up(wrong)
        else:
            causes = "the network may be down, or the transfer very large"
            if any(s.inside == GRADIENTS for s in inside):
                causes += ", or the ranks step different optimizers"
            self.actions.log(
                "warning", f"{text} for {limit_s:g} s, and no rank is missing: {causes}"
            )

    def _where_all(self, inside: list[WorkerRecord]) -> str:
        """Describe the collectives in which ranks wait.

        Collectives with the fewest ranks come first, because these ranks have probably diverged.
        """
        groups: dict[tuple[str, int], list[WorkerRecord]] = {}
        for record in inside:
            groups.setdefault((record.inside, record.entered), []).append(record)
        ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[0]))
        parts = [
            f"{self._names(there)} wait{'s' if len(there) == 1 else ''} in {name!r}"
            f" (collective {entered}{_at(there, ', ')})"
            for (name, entered), there in ordered[:NAMED]
        ]
        more = [f"{len(ordered) - NAMED} more groups elsewhere"] if len(ordered) > NAMED else []
        return ", ".join([*parts, *more])

    # ---- GPUs that hang --------------------------------------------------------------------------------------------

    def _hangs(self) -> Iterator[HangFinding]:
        if self.worlds.phase is Phase.GATHERING or any(s.killed_for for s in self.worlds.live()):
            return
        groups: dict[str, list[RankReport]] = {}
        for record in self.roster.inside.values():
            for launches in record.gpu if not record.phase else ():
                witness = RankReport(record.worker, launches, record.gpu_since, record.said_at)
                groups.setdefault(launches.group, []).append(witness)
        found = (
            judge(each, self.settings, self.worlds.give_up.worlds_hung) for each in groups.values()
        )
        # Prefer findings that blame specific workers.
        yield from sorted((each for each in found if each is not None), key=lambda f: not f.blamed)

    def _hung(self, finding: HangFinding) -> None:
        for worker in finding.blamed:
            self.worlds.give_up.was_stuck(self.worlds.generation)
            self.staff.fence(self.roster[worker], hang_of_one(finding))
        if finding.blamed:
            return
        hung = hang_of_all(finding, self.worlds.give_up.worlds_hung)
        self.worlds.give_up.hung(self.worlds.generation)
        if not self.settings.elastic:
            self.worlds.end(1, hung)
        self.actions.log("error", str(hung))
        self.worlds.break_up(hung)

    # ---- text ------------------------------------------------------------------------------------------------------

    def _names(self, records: Iterable[WorkerRecord]) -> str:
        found = [*records]
        if len(found) > 1 and len(found) == len(self.worlds.members):
            return f"all {len(found)} members"
        named = [self.worlds.named(record) for record in found[:NAMED]]
        more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
        return " and ".join([", ".join(named), *more])

    def _name_of(self, worker: Worker) -> str:
        record = self.roster.get(worker)
        return str(worker) if record is None else self.worlds.named(record)


def _at(waiters: Iterable[WorkerRecord], before: str = " ") -> str:
    """Return the script lines at which the workers wait, as text after ``before``. Unknown lines are omitted."""
    lines = sorted({record.line for record in waiters} - {""})
    more = [f"{len(lines) - NAMED} more lines"] if len(lines) > NAMED else []
    listed = " and ".join([", ".join(lines[:NAMED]), *more])
    return f"{before}at {listed}" if lines else ""


def _counts(gpu: Iterable[Launches]) -> list[tuple[str, int, int, int, bool]]:
    return [(each.group, each.launched, each.arrived, each.done, each.failed) for each in gpu]
