"""Handling of expired deadlines: for answers, stops and returns, and for the formation of the next world.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic.driver.membership.records.roster import WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Phase
from elastic.driver.reasons import ReasonKind, because

# Seconds after its start during which a worker is not expected to have called init(). On a busy machine, importing
# large libraries can take more than a minute.
IMPORTS_S = 120.0


class Deadlines(Part):
    """Collection of the deadlines of the current phase, and of processes that are starting or exiting."""

    def all(self) -> Iterator[float]:
        """Yield all deadlines."""
        starting = self.worlds.phase is not Phase.ENDING and self.worlds.root_cause_search is None
        gathering = self.worlds.phase is Phase.GATHERING
        first = not self.worlds.members or (gathering and self.worlds.gathering.anew)
        yield from self.staff.deadlines(starting=starting, first=first)
        if self.worlds.root_cause_search is not None:
            yield self.worlds.root_cause_search.by
        by: list[float | None] = []
        match self.worlds.phase:
            case Phase.GATHERING:
                late = self.worlds.gathering.late or not self.worlds.members
                by = [
                    None if late else self.worlds.gathering.late_at,
                    self.worlds.gathering.short_by,
                    self.worlds.signs.by,
                ]
                if not late:
                    by.append(self.worlds.gathering.remind_at)
                by.append(self._init_remind_at())
            case Phase.TRAINING:
                by = [self.worlds.look_again_at]
            case Phase.PREPARING | Phase.STOPPING:
                by = [self.worlds.change.by, self.worlds.change.remind_at]
            case Phase.ENDING:
                by = [self.worlds.ending_by]
        yield from (at for at in by if at is not None)

    def overdue(self) -> None:
        """Handle the deadlines of the current phase that have expired."""
        if self.worlds.root_cause_search is not None and self.actions.expired(
            self.worlds.root_cause_search.by
        ):
            suspects = (s.worker for s in self.roster.in_plans())
            if not self.worlds.root_cause_search.wait_longer(suspects):
                assert self.worlds.root_cause_search.verdict is not None
                self.worlds.end(1, self.worlds.root_cause_search.verdict)
        self._remind_of_change()
        match self.worlds.phase:
            case Phase.PREPARING if self.actions.expired(self.worlds.change.by):
                silent = ", ".join(map(str, sorted(self.worlds.change.silent)))
                self.worlds.call_off(because(ReasonKind.NO_ANSWER, workers=silent))
                self.worlds.change.put_off(self.actions.now)
            case Phase.STOPPING if self.actions.expired(self.worlds.change.by):
                late = [
                    str(s.worker) for s in self.worlds.live() if s.stage is not WorkerStage.READY
                ]
                missed = because(
                    ReasonKind.NOT_STOPPED,
                    workers=", ".join(late),
                    check=max(self.worlds.change.checks.values()),
                    within_s=self.settings.elastic_timeout_s,
                )
                self.worlds.break_up(missed)
            case Phase.ENDING if self.actions.expired(self.worlds.ending_by):
                self.worlds.ending_by = None
                self.worlds.finish(
                    f"waited {self.settings.elastic_timeout_s:g} s for the remaining workers to return; continuing"
                    " without them"
                )
            case Phase.GATHERING:
                self._remind_of_init()
                if self.worlds.members and not self.worlds.gathering.late:
                    self._remind()
                    self._gathering_late()
                if self.actions.expired(self.worlds.gathering.short_by):
                    self.worlds.end(1, self.worlds.give_up.too_few())
            case _:
                pass

    def restarted(self) -> None:
        """Extend all deadlines after a driver failover, so that workers are not blamed for the delay."""
        self.worlds.gathering.begin_again(self.actions.now)
        by = self.actions.now + self.settings.elastic_timeout_s
        self.worlds.change.by = None if self.worlds.change.by is None else by
        self.worlds.ending_by = None if self.worlds.ending_by is None else by

    def _remind(self) -> None:
        if self.actions.expired(self.worlds.gathering.remind_at):
            self.worlds.gathering.remind_after_s *= 2
            awaited = list(self.worlds.gathering.awaited(self.roster))
            if awaited:
                self.actions.log(
                    "warning", self.worlds.gathering.reminder(awaited, self.actions.now)
                )

    def _init_remind_at(self) -> float | None:
        """Return the time at which to log that workers have not called init(), or None for never.

        The result is None in a fixed-size job, which may run programs that never call init().
        """
        first = next(self.roster.first_at(WorkerStage.STARTING), None)
        if first is None or self.worlds.members or not self.settings.elastic:
            return None
        return first.started_at + self.worlds.gathering.remind_after_s

    def _remind_of_init(self) -> None:
        at, now = self._init_remind_at(), self.actions.now
        if at is None or at > now:
            return
        late = [*self.roster.first_at(WorkerStage.STARTING)]
        while late[0].started_at + self.worlds.gathering.remind_after_s <= now:
            self.worlds.gathering.remind_after_s *= 2
        workers, for_s = sum(1 for _ in self.roster.in_plans()), now - late[0].started_at
        importing = len(late) == workers and for_s < IMPORTS_S
        about = because(
            ReasonKind.AWAITS_INIT,
            late=len(late),
            workers=workers,
            for_s=for_s,
            importing=importing,
        )
        self.actions.log("info" if importing else "warning", str(about), about)

    def _remind_of_change(self) -> None:
        change, now = self.worlds.change, self.actions.now
        waits = self.worlds.phase in (Phase.PREPARING, Phase.STOPPING)
        if not waits or change.by is None or not change.remind_at <= now < change.by:
            return
        while change.remind_at <= now:
            change.remind_after_s *= 2
        about = because(
            ReasonKind.AWAITS_COMMIT,
            joining=len(self.worlds.joining()),
            leaving=sum(w in self.worlds.world.places for w in self.roster.leavers),
            for_s=now - change.began_at,
            within_s=change.by - now,
        )
        # A member that has reached a commit waits for the others. `Stuck` logs such waits.
        none_ready = all(s.stage is not WorkerStage.READY for s in self.worlds.live())
        if none_ready and (about.facts["joining"] or about.facts["leaving"]):
            self.actions.log("warning", str(about), about)

    def _gathering_late(self) -> None:
        if not self.actions.expired(self.worlds.gathering.late_at):
            return
        self.worlds.gathering.late = True
        for record in list(self.worlds.gathering.missing(self.roster)):
            if record.running:
                late = because(ReasonKind.NOT_READY, within_s=self.settings.elastic_timeout_s)
                self.staff.fence(record, late)
            elif not self.settings.elastic:
                waited_s, name = self.settings.elastic_timeout_s, self.worlds.named(record)
                self.worlds.end(1, because(ReasonKind.NOT_ENTERED, who=name, for_s=waited_s))
