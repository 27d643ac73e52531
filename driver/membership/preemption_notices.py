"""Handling of preemption notices, which announce that machines will be reclaimed. Deterministic.

    announced --> the machine's workers leave at the next safepoint if enough others stay; it gets no new workers
              --> HURRY_S before the end, its workers leave even if too few stay
    withdrawn --> workers that have not left yet stay

If all members run on such machines, no worker could continue. The members then keep training, and a checkpoint is
requested at once and again shortly before the end. If all workers and the driver's own machine are reclaimed, the job
ends when this checkpoint is durable. Rerunning the command resumes from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic.driver.events import (
    CheckpointMade,
    Event,
    HastenCheckpoint,
    HostLeaving,
    HostReported,
    HostStaying,
    Notice,
)
from elastic.driver.membership.operator_requests import LEFT_OUT
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Phase, Worlds
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.protocol.messages import Commit

# seconds before a machine is reclaimed at which its workers leave even if too few workers stay
HURRY_S = 10.0
# seconds before the announced end at which the last checkpoint is requested if all machines are reclaimed
LAST_CHECKPOINT_S = 20.0
# Minimum interval between the first and the last checkpoint, in seconds. If less time remains, only one is requested.
APART_S = 1.0
# The job ends this many seconds before the driver's machine is reclaimed, with or without a checkpoint.
LAST_S = 3.0
# Seconds from the announced end until the host may be used again. By then, either the machine has been replaced, or the
# notice was a false alarm.
GONE_S = 60.0
# assumed number of seconds until the machine is reclaimed, if the notice does not contain it
UNKNOWN_S = 600.0
# exit code of the job, the same as after SIGTERM, so that a batch system can requeue it
STOPPED = 143


@dataclass
class Departure:
    """Preemption notice for one machine.

    Args:
        by: time at which the machine is reclaimed, in seconds on the caller's clock, or None if unknown.
    """

    text: str
    by: float | None
    alone: bool

    def before(self, seconds: float, since: float) -> float | None:
        """Return the time that is ``seconds`` before the end of the machine, or None if the end is unknown.

        If less than ``2 * seconds`` remain at ``since``, return the time halfway between ``since`` and the end.
        """
        return None if self.by is None else self.by - min(seconds, max(0.0, self.by - since) / 2)


class Notices(Part):
    """Tracker of preemption notices, which decides when workers leave."""

    def __init__(self, worlds: Worlds) -> None:
        super().__init__(worlds)
        self.announced: dict[str, Departure] = {}
        self._hurry_at: dict[str, float] = {}
        # Times of pending checkpoint requests, whether all machines will be reclaimed, and whether the last request was
        # sent.
        self._ask_at: list[float] = []
        self._all_go = False
        self._last_asked = False
        # Generation to which the checkpoint request was sent. None after the answer.
        self._asked_in: int | None = None
        self._earlier = False  # whether the next answer may belong to the previous request
        # Announced end before which the last checkpoint is scheduled.
        self._last_by: float | None = None
        self._newest: Commit | None = None  # newest commit in a durable checkpoint
        self._end_at: float | None = None
        # key of the state in which all members were last checked; see `watch`
        self._looked_at: tuple[int, int, int] | None = None

    def handle(self, event: Event) -> bool:
        """Handle a notice about a machine. Return False for other events."""
        match event:
            case HostLeaving(host, notice, alone):
                self._leaves(host, notice, alone=alone)
            case HostStaying(host):
                self._stays(host)
            case _:
                return False
        return True

    def reported(self, event: HostReported) -> None:
        """Apply the notice, or its absence, in an agent's report. The report replaces earlier notices for the host."""
        if event.notice is not None:
            self._leaves(event.host, event.notice, alone=False)
        else:
            self._stays(event.host)

    def listed(self, hosts: dict[str, int]) -> None:
        """Apply a new list of hosts. If a removed host reappears, it counts as a new machine."""
        for host in self._hurry_at.keys() & hosts.keys() - self.announced.keys():
            del self._hurry_at[host]
        for host in self.announced.keys() - hosts.keys():
            hurry_at = self._hurry_at.get(host)
            self._clear(host)
            for record in self.roster.hosts.get(host, {}).values():
                if record.noticed:
                    record.unlisted, record.noticed = True, False
                    # The machine is still going to be reclaimed, so its workers leave before the end even without
                    # replacements.
                    if hurry_at is not None:
                        self._hurry_at[host] = hurry_at

    def checkpoint_made(self, event: CheckpointMade) -> None:
        """Record the newest commit that survives the loss of all machines."""
        self._newest = max(self._newest or event.commit, event.commit)
        if self._earlier:
            self._earlier = False
            return
        if self._asked_in is not None and event.commit.generation < self._asked_in:
            # The checkpoint was written by an earlier world, or workers reported the one that they restored.
            return
        self._asked_in = None
        if self._last_asked and self._end_at is not None:
            self._end()

    # ---- one machine -----------------------------------------------------------------------------------------------

    def _leaves(self, host: str, notice: Notice, *, alone: bool) -> None:
        now = self.actions.now
        by = None if notice.within_s is None else now + max(0.0, notice.within_s)
        known = self.announced.get(host)
        if known is None:
            left = "" if by is None else f" in {max(0.0, by - now):.0f} s"
            then = (
                "its workers leave"
                if self.settings.elastic and not alone
                else "the job has a fixed size (no --min-np), so it ends"
            )
            self.actions.log("warning", f"{host} will be reclaimed{left} ({notice.text}): {then}")
        elif known.by is not None and (by is None or by > known.by):
            by = known.by  # The earlier notice announces an earlier end, so it is kept.
        departure = self.announced[host] = Departure(notice.text, by, alone)
        self._looked_at = None
        if alone:
            self._end_at = departure.before(LAST_S, now)
        if alone or not self.settings.elastic:
            return  # No smaller world can continue the job, so all workers keep training until the end.
        self.staff.slots.close(host, (now + UNKNOWN_S if by is None else by) + GONE_S)
        hurry_at = departure.before(HURRY_S, now)
        if hurry_at is not None:
            self._hurry_at[host] = hurry_at
        for record in [*self.roster.hosts.get(host, {}).values()]:
            # SIGTERM may have been sent to all processes of the machine. Then the agent's notice contains the remaining
            # time.
            leaving = record.leaving
            asked = leaving is not None and leaving.kind is ReasonKind.TOLD
            if record.in_plans and (asked or leaving is None):
                record.noticed = True
                self.staff.ask_to_leave(record, self._why(host), self.worlds.world.places)

    def _stays(self, host: str) -> None:
        if host not in self.announced:
            return
        self.actions.log(
            "info", f"the preemption notice of {host} was withdrawn ({self.announced[host].text})"
        )
        why = self._why(host)
        self._clear(host)
        self.staff.slots.reopen(host)
        for record in self.roster.hosts.get(host, {}).values():
            leaving = record.leaving
            # Workers that an operator has asked to leave are not affected.
            drained = leaving is not None and leaving.kind in LEFT_OUT
            if record.in_plans and not drained and (record.noticed or leaving == why):
                record.leaving, record.noticed = None, False

    def _clear(self, host: str) -> None:
        self._looked_at = None
        if self.announced.pop(host).alone:
            self._end_at = None
        self._hurry_at.pop(host, None)

    def _why(self, host: str) -> Reason:
        return because(ReasonKind.HOST_LEAVES, host=host, notice=self.announced[host].text)

    # ---- all machines ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Request checkpoints if all machines will be reclaimed. Must be called after every event."""
        # Checking all members after every event would be slow, so the check is skipped if nothing has changed.
        basis = (self.worlds.generation, self.roster.shifts, self.staff.slots.version)
        if basis != self._looked_at:
            self._looked_at = basis
            self._look_at_all()
        self._ask()

    def _look_at_all(self) -> None:
        members = self.worlds.live() if self.announced else []
        going = [self.announced.get(record.worker.host) for record in members]
        # A fixed-size job ends when its first machine is reclaimed.
        elastic = self.settings.elastic
        gone = bool(going) and None not in going if elastic else any(going)
        all_leave = gone and self.worlds.world.running
        if all_leave:
            ends = [each.by for each in going if each is not None]
            known = [by for by in ends if by is not None]
            last = (max if elastic else min)(known) if len(known) == len(ends) else None
            if not self._all_go:
                self._all_leave(last)
            elif last != self._last_by and self.settings.restarts is not None:
                self._schedule(last)
        if not all_leave:
            self._ask_at, self._last_asked, self._asked_in = [], False, None
            self._earlier = False
        elif self._asked_in not in (None, self.worlds.generation):
            # A new world has replaced the one that received the request.
            self._ask_at.insert(0, self.actions.now)
            self._asked_in, self._earlier = None, False
        self._all_go = self.worlds.all_go = all_leave

    def _all_leave(self, last: float | None) -> None:
        if self.settings.restarts is None:
            text = "all machines of this job will be reclaimed, and the job has its commits in memory only"
            self.actions.log("error", f"{text}; to resume such a job, use --checkpoint-dir")
            return
        which = "all machines" if self.settings.elastic else "a machine"
        text = f"{which} of this job will be reclaimed; the job keeps training and writes a checkpoint first"
        self.actions.log("warning", text)
        self._ask_at = [self.actions.now]
        self._schedule(last)

    def _schedule(self, last: float | None) -> None:
        """Schedule the last checkpoint before the time ``last``, which is None if the end is unknown.

        If this method is called again with an earlier end, it reschedules the checkpoint.
        """
        now, self._last_by = self.actions.now, last
        self._ask_at = [at for at in self._ask_at if at <= now]
        if last is None:
            return
        at = last - LAST_CHECKPOINT_S
        if at > now + APART_S:
            self._ask_at.append(at)
            self._last_asked = False
        elif not self._ask_at and not self._last_asked:
            self._ask_at.append(now)

    def _end(self) -> None:
        notice = "; ".join(each.text for each in self.announced.values() if each.alone)
        newest = None if self._newest is None else self._newest.dotted
        durable = self.settings.restarts is not None
        self.worlds.end(
            STOPPED,
            because(ReasonKind.MACHINE_LEAVES, notice=notice, newest=newest, durable=durable),
        )

    # ---- time ------------------------------------------------------------------------------------------------------

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which `overdue` must be called."""
        yield from self._hurry_at.values()
        if self._ask_at and self.worlds.phase is Phase.TRAINING:
            yield self._ask_at[0]
        if self._end_at is not None:
            yield self._end_at

    def overdue(self) -> None:
        """Ask workers to leave if their machine is about to be reclaimed."""
        for host in [host for host, at in self._hurry_at.items() if self.actions.expired(at)]:
            del self._hurry_at[host]
            for record in self.roster.hosts.get(host, {}).values():
                if record.noticed or record.unlisted:
                    record.unlisted = record.noticed = False
        if self.actions.expired(self._end_at):
            self._end()

    def _ask(self) -> None:
        if not self._ask_at or self.worlds.phase is not Phase.TRAINING:
            return
        if self.actions.expired(self._ask_at[0]):
            del self._ask_at[0]
            self._last_asked = not self._ask_at
            self._earlier = self._asked_in == self.worlds.generation
            self._asked_in = self.worlds.generation
            self.actions.add(HastenCheckpoint(self.worlds.generation, self.worlds.members[0]))
