"""Decisions about workers that are frozen or unreachable. Deterministic.

The following workers have not exited, so no collective fails, but their world makes no progress:

    frozen    the agent reports that the worker cannot run (the process is stopped, or its container is paused): fenced
              immediately if another worker trains with it, will train with it, or waits for it; a worker that is alone
              in its world may have been stopped on purpose, and is not fenced
    cut off   the worker's host no longer acknowledges packets: fenced immediately; given up if the kill cannot reach it
    lost      the whole host is unreachable, including its agent: given up immediately, because no process can be killed
              there; if all members run there, no worker could continue, so the job waits for the host to return

"Given up" means that the world continues without the worker. If the worker resumes later, its generation is over and
its messages are ignored.
"""

from __future__ import annotations

from elastic.driver.events import Event, HostLost, WorkerFrozen, WorkerThawed
from elastic.driver.membership.records.roster import AT_STAKE, WorkerRecord, WorkerStage
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Worlds
from elastic.driver.reasons import Reason, ReasonKind, because, counted
from elastic.protocol.messages import Worker


class Frozen(Part):
    """Handler of reports about frozen workers and unreachable hosts. It checks deadlines after every event."""

    def __init__(self, worlds: Worlds) -> None:
        super().__init__(worlds)
        self._alone_said: set[Worker] = set()
        # deadline and reason for each lost host whose return is awaited
        self._hosts_awaited: dict[str, tuple[float, Reason]] = {}

    def handle(self, event: Event) -> bool:
        """Handle an event about an agent or a host. Return False for other events."""
        match event:
            case WorkerFrozen():
                self.has_frozen(event)
            case WorkerThawed():
                self.thawed(event)
            case HostLost():
                self.host_lost(event)
            case _:
                return False
        return True

    def next_deadline(self) -> float | None:
        """Return the time at which the wait for a lost host ends, or None if no host is awaited."""
        return min((by for by, _ in self._hosts_awaited.values()), default=None)

    def restarted(self) -> None:
        """Reset the state after a restart of the driver. Agents will report frozen workers and lost hosts again."""
        self._hosts_awaited.clear()
        for record in self.roster.values():
            record.frozen = ""

    def has_frozen(self, event: WorkerFrozen) -> None:
        record = self.roster.get(event.worker)
        if record is None or record.killed_for:
            return
        if record.frozen:
            return  # Agents repeat the report while a worker is frozen.
        record.frozen = event.how or "not able to run"
        if record.stage not in AT_STAKE:
            text = f"{self.worlds.named(record)} is frozen ({record.frozen}); no other worker trains with it"
            self.actions.log("warning", text)

    def thawed(self, event: WorkerThawed) -> None:
        record = self.roster.get(event.worker)
        if record is None or not record.frozen:
            return
        record.frozen = ""
        self._alone_said.discard(event.worker)
        if not record.killed_for:
            record.moved_at = self.actions.now
            self.actions.log("info", f"{self.worlds.named(record)} is running again")

    def speaks(self, record: WorkerRecord) -> None:
        """Clear the frozen state of a worker, because it has sent a message."""
        if record.frozen and not record.killed_for:
            record.frozen = ""
            self._alone_said.discard(record.worker)

    def fence(self) -> None:
        """Fence frozen members. Called before all other checks, because the world would wait for these members."""
        for record in [*self.roster.frozen.values()]:
            reason = because(ReasonKind.FROZEN, how=record.frozen)
            if self._has_company(record):
                self.staff.fence(record, reason)
            elif record.worker not in self._alone_said:
                self._alone_said.add(record.worker)
                text = f"{self.worlds.named(record)} is frozen ({record.frozen})"
                self.actions.log("warning", f"{text}; no other worker trains, so it is not killed")

    def _has_company(self, record: WorkerRecord) -> bool:
        """Return whether another worker trains with the frozen worker, or will train with it in the next world.

        For a member, only other members count, because workers that are about to join have no progress. If all members
        are frozen, one of them must remain.
        """
        member = record.worker in self.worlds.world.places
        return any(
            other is not record
            and not other.killed_for
            and not other.frozen
            and (not member or other.worker in self.worlds.world.places)
            for other in self.roster.first_at(
                WorkerStage.MEMBER, WorkerStage.RETURNED, WorkerStage.READY
            )
        )

    # ---- a whole host ----------------------------------------------------------------------------------------------

    def host_lost(self, event: HostLost) -> None:
        """Handle the loss of a host.

        The processes on the host can be neither killed nor observed, so their slots stay occupied until their exits are
        reported.
        """
        host, text = event.host, event.reason
        reason = because(ReasonKind.LOST_HOST, host=host, text=text)
        gone = [s for s in self.roster.hosts.get(host, {}).values() if s.in_plans]
        workers = counted(len(gone), "worker")
        if not gone:
            self.actions.log("warning", str(reason))
        elif not self._all_there(host):
            self.actions.log("error", f"{reason}; continuing without its {workers}")
            lost = because(ReasonKind.LOST_WITH_HOST, host=host, text=text, workers=len(gone))
            self._without_host(host, lost)
        elif host not in self._hosts_awaited:
            by_s = self.settings.elastic_timeout_s
            self._hosts_awaited[host] = (self.actions.now + by_s, reason)
            awaited = (
                f"all members run there, so the job waits {by_s:g} s for it (--elastic-timeout)"
            )
            self.actions.log("error", f"{reason}; {awaited}")

    def _all_there(self, host: str) -> bool:
        places, found = self.worlds.world.places, False
        for record in self.roster.first_at(*AT_STAKE):
            if record.worker in places:
                if record.worker.host != host and not record.killed_for:
                    return False
                found = True
        return found

    def host_is_back(self, host: str) -> None:
        """Handle a report from the agent of a host that had been declared lost."""
        if self._hosts_awaited.pop(host, None) is not None:
            self.actions.log("info", f"host {host} reconnected with all its workers")

    def give_up_hosts(self) -> None:
        for host, (by, reason) in [*self._hosts_awaited.items()]:
            if self.actions.expired(by):
                del self._hosts_awaited[host]
                self._without_host(host, reason)

    def _without_host(self, host: str, reason: Reason) -> None:
        here, places = self.roster.hosts.get(host, {}), self.worlds.world.places
        members = self.roster.live(worker for worker in here if worker in places)
        for record in [*here.values()]:
            if record.in_plans:
                record.killed_for = record.killed_for or reason
                record.exit_by = None
                record.stage = WorkerStage.DISMISSED
        if members:
            self.given_up(min(members, key=lambda s: places[s.worker].rank), reason)

    def given_up(self, record: WorkerRecord, reason: Reason) -> None:
        """Stop waiting for the exit of an unreachable worker."""
        if not self.settings.elastic:
            self.worlds.end(
                1, because(ReasonKind.LOST_FOR_GOOD, who=self.worlds.named(record), cause=reason)
            )
        self.worlds.lose(record, reason)
