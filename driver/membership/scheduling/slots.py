"""Selection of the slots that get a worker. Pure: no I/O, no clock.

A slot is free if all of these conditions hold: it is listed, has no live process, is not cooling down after a failure,
was not vacated on request, and is not quarantined; its program has not exited successfully; and its machine is not
about to be reclaimed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from elastic.driver.membership.scheduling import rank_order
from elastic.driver.membership.scheduling.cooldown import Cooldown, Slot
from elastic.driver.reasons import Reason
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker


class Slots:
    """Slots listed by discovery, and the history of their workers."""

    def __init__(self, settings: Settings) -> None:
        self.known = False  # whether discovery has yielded a list yet
        self.fixed = False  # whether discovery cannot add hosts or slots later
        self.queued = 0  # number of hosts waiting for admission by the cluster's queue
        self.version = 0  # incremented when a slot may have become usable
        # Slots whose program exited with code 0 outside elastic.run.
        self.completed: set[Slot] = set()
        self.cooldown = Cooldown(
            settings.cooldown_min_s,
            settings.cooldown_max_s,
            settings.slot_attempts,
            settings.host_attempts,
        )
        # Result of the last health check, for slots that failed it.
        self.unhealthy: dict[Slot, Reason] = {}
        # Slots whose worker computed wrong results, in jobs without a health check that could clear them.
        self.quarantined: dict[Slot, Reason] = {}
        self._whole_hosts = settings.quarantine == "host"
        self._hosts: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._incarnations: dict[Slot, int] = {}
        self._left: set[Slot] = set()  # slots whose worker left on request
        # for each slot, the number of consecutive exits with a positive exit code
        self._failures: dict[Slot, int] = {}
        # For each host that will be reclaimed, the time before which no worker is started there.
        self._closed: dict[str, float] = {}
        self._drained: set[str] = set()  # hosts drained by an operator

    def announce(self, hosts: dict[str, int], *, fixed: bool = False) -> None:
        """Replace the list of hosts with a new one from discovery.

        Args:
            hosts: number of slots of each host, in order of preference.
            fixed: whether discovery cannot add hosts or slots later.
        """
        for host in self._hosts.keys() - hosts.keys():
            self.cooldown.forget_host(host)
            self._closed.pop(host, None)
            self._drained.discard(host)  # If the host reappears, it counts as a different machine.
            self.unhealthy = {s: why for s, why in self.unhealthy.items() if s[0] != host}
            self._release(host)
        # The host is new or has more slots than before, so its vacated slots may be used again.
        grown = {host for host, count in hosts.items() if count > self._hosts.get(host, 0)}
        self._left = {slot for slot in self._left if slot[0] not in grown}
        self.known, self.fixed = True, fixed
        self.version += 1
        self._hosts = dict(hosts)
        self._order = {host: index for index, host in enumerate(hosts)}

    def lists(self, worker: Worker) -> bool:
        return worker.slot < self._hosts.get(worker.host, 0)

    def order(self, worker: Worker) -> tuple[int, str, int]:
        """Return the sort key of a worker: the position of its host in the discovery's list, then the slot number."""
        return (self._order.get(worker.host, len(self._order)), worker.host, worker.slot)

    @property
    def started(self) -> int:
        """Return the number of slots that have ever been used."""
        return len(self._incarnations)

    def ended(self, slot: Slot, code: int) -> None:
        """Record that a slot's worker exited without being killed by the driver.

        Args:
            code: exit code; negative for a signal, as in subprocess.
        """
        if code > 0:
            self._failures[slot] = self._failures.get(slot, 0) + 1
        else:
            self._failures.pop(slot, None)

    def all_fail(self) -> bool:
        """Return whether the latest worker of every used slot exited with an error.

        At least two such exits are required, so a single slot must have failed twice.
        """
        all_slots = len(self._failures) == len(self._incarnations)
        return all_slots and sum(self._failures.values()) > 1

    def any_failed(self) -> bool:
        """Return whether the latest worker of any slot exited with an error."""
        return bool(self._failures)

    def start(self, slot: Slot) -> Worker:
        """Return a new worker for the slot, with the next incarnation number."""
        self._left.discard(slot)
        self._incarnations[slot] = self._incarnations.get(slot, 0) + 1
        return Worker(*slot, self._incarnations[slot])

    def leave(self, slot: Slot) -> None:
        """Record that the worker of a slot was asked to leave.

        The slot then stays empty unless there are too few workers.
        """
        self._left.add(slot)
        self.version += 1

    def close(self, host: str, until: float) -> None:
        """Mark a host as about to be reclaimed. No worker is started there before the time ``until``."""
        self._closed[host] = until
        self.version += 1

    def reopen(self, host: str) -> None:
        """Allow new workers on a host again, because its machine was replaced or will not be reclaimed."""
        if self._closed.pop(host, None) is not None:
            self.version += 1

    def closed(self, host: str, now: float) -> bool:
        """Return whether the host will be reclaimed."""
        return now < self._closed.get(host, now)

    def any_closed(self, hosts: Collection[str], now: float) -> bool:
        """Return whether any of these hosts will be reclaimed."""
        return any(host in hosts and now < until for host, until in self._closed.items())

    def drain(self, host: str) -> None:
        """Drain a host: no workers start on it until `refill` is called or the host leaves the list."""
        self._drained.add(host)
        self.version += 1

    def refill(self, host: str) -> None:
        """Allow new workers again on a host that was drained or has quarantined slots."""
        self._drained.discard(host)
        self._release(host)
        self.version += 1

    def quarantine(self, slot: Slot, why: Reason) -> None:
        """Quarantine a slot, or its host if so configured, until `refill` is called or the host leaves the list."""
        self.quarantined[slot] = why
        self.version += 1

    def kept_out(self, slot: Slot) -> bool:
        """Return whether a slot is quarantined."""
        if not self._whole_hosts:
            return slot in self.quarantined
        return any(host == slot[0] for host, _ in self.quarantined)

    def _release(self, host: str) -> None:
        self.quarantined = {s: why for s, why in self.quarantined.items() if s[0] != host}

    def drained(self, host: str) -> bool:
        return host in self._drained

    @property
    def drained_hosts(self) -> list[str]:
        """Return the listed hosts that an operator has drained."""
        return [host for host in self._hosts if host in self._drained]

    @property
    def hosts(self) -> list[str]:
        """Return the listed hosts."""
        return [*self._hosts]

    def open(self, now: float, *, without: str = "") -> int:
        """Return the number of slots on hosts that will not be reclaimed, excluding the host ``without``."""
        return sum(
            not self.kept_out(slot)
            for slot in rank_order.slots(self._hosts)
            if slot[0] not in (*self._drained, without) and not self.closed(slot[0], now)
        )

    def complete(self, slot: Slot) -> None:
        """Record that the program in a slot exited with code 0, so the slot gets no further worker."""
        self.completed.add(slot)
        self.version += 1

    def failed(self, slot: Slot, now: float, *, fruitful: bool) -> float | None:
        """Record a failure of a slot's worker.

        Return the seconds until the slot may be used again, or None if the slot is given up. See `Cooldown.failed`.
        """
        self.version += 1
        return self.cooldown.failed(slot, now, fruitful=fruitful)

    def failed_check(self, slot: Slot, now: float, why: Reason) -> float:
        """Record a failed health check of a slot. Return the seconds until the slot may be used again."""
        self.unhealthy[slot] = why
        self.version += 1
        return self.cooldown.unhealthy(slot, now)

    def passed_check(self, slot: Slot) -> bool:
        """Record that a slot passed its health check. Return whether the previous check of the slot had failed."""
        failed = self.unhealthy.pop(slot, None) is not None
        if failed:
            self.cooldown.clear([slot])
        return failed

    def free(self, live: Mapping[str, Iterable[Worker]], now: float, *, short: bool) -> list[Slot]:
        """Return the slots in which a worker could be started now.

        Args:
            live: the live processes, by host.
            now: current time, in seconds.
            short: whether there are too few workers, in which case vacated slots may be used as well.
        """
        return [
            slot
            for slot, at in self._usable(live)
            if at <= now and (short or slot not in self._left)
        ]

    def next_at(
        self, live: Mapping[str, Iterable[Worker]], now: float, *, short: bool
    ) -> float | None:
        """Return the time at which the next cooling slot becomes usable, in seconds, or None if no slot is cooling."""
        usable = self._usable(live)
        times = [at for slot, at in usable if at > now and (short or slot not in self._left)]
        return min(times, default=None)

    def _usable(self, live: Mapping[str, Iterable[Worker]]) -> Iterator[tuple[Slot, float]]:
        # Iterate by host, because nearly all hosts of a large job are full.
        for host, count in self._hosts.items():
            taken = {worker.slot for worker in live.get(host, ())}
            for number in range(count):
                if number not in taken:
                    yield from self._if_usable((host, number))

    def _if_usable(self, slot: Slot) -> Iterator[tuple[Slot, float]]:
        if slot[0] in self._drained or self.kept_out(slot) or slot in self.completed:
            return
        ready_at = self.cooldown.ready_at(slot)
        if ready_at is not None:
            yield slot, max(ready_at, self._closed.get(slot[0], ready_at))

    def spent(self) -> bool:
        """Return whether no listed slot can ever be used again. False for an empty list, which may still grow."""
        listed = list(rank_order.slots(self._hosts))
        return bool(listed) and all(
            slot in self.completed or self.cooldown.given_up(slot) for slot in listed
        )

    def usable(self, taken: Collection[Slot]) -> int:
        """Return the number of listed slots that run a worker, or can run one now or later."""
        return sum(
            slot in taken or not (slot in self.completed or self.cooldown.given_up(slot))
            for slot in rank_order.slots(self._hosts)
        )

    def given_up(self) -> list[Slot]:
        """Return the listed slots that are no longer used because of failures."""
        return [s for s in rank_order.slots(self._hosts) if self.cooldown.given_up(s)]

    def listed_unhealthy(self) -> list[Slot]:
        """Return the listed slots whose last health check failed."""
        return [s for s in rank_order.slots(self._hosts) if s in self.unhealthy]

    def any_given_up(self) -> bool:
        return bool(self.given_up())
