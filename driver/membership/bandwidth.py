"""Decisions about host bandwidth: when each host is measured, and whether its workers are admitted.

Pure: no I/O, no clock.

A host is measured when the health check of one of its slots has passed. The measurement is a transfer in each direction
between the host and a peer. The peer is the host of rank 0 or, before the first world, the first host of the list,
which will have rank 0. Hosts are measured one at a time, because concurrent transfers to the peer would share its
bandwidth.

A host is too slow if, in two consecutive measurements, it sends or receives at less than a given fraction of the median
rate of the other hosts, measured to the same peer. Two measurements are required, because other traffic could slow a
single one. The workers of a host wait for its result, unless the job has too few hosts for a comparison. Before the
first world, all hosts wait until the last host has been measured, so no host is measured if there are more than
HOSTS_MOST. Later, if too few hosts of members have been measured for a comparison, up to REFERENCES of them are
measured first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from elastic.driver.events import BandwidthMeasured, MeasureBandwidth
from elastic.driver.membership.records.roster import WorkerRecord
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Worlds
from elastic.driver.settings import AUTO
from elastic.protocol.messages import Worker

OTHERS_MIN = 2  # minimum number of other hosts for a comparison
REFERENCES = 3  # maximum number of members measured only to have values for a comparison
# maximum number of hosts that wait for a measurement; further hosts are not measured
HOSTS_MOST = 32
# maximum age of a measurement that is reused for later workers of the host, in seconds
FRESH_S = 60.0
TOGETHER_S = (
    3.0  # seconds that the first measurement waits for the health checks of the other workers
)
RESULT_S = 6.0  # timeout for the result of a measurement, in seconds
WAIT_S = 20.0  # seconds after which a worker is admitted without a result

Evidence = str | float | int


def too_slow(
    mine: BandwidthMeasured, others: Iterable[BandwidthMeasured], factor: float
) -> dict[str, Evidence] | None:
    """Compare the bandwidth of a host with that of others.

    Args:
        mine: measurement of the host.
        others: measurements of other hosts.
        factor: fraction of the median below which the host is too slow.

    Returns:
        The evidence: ``direction``, ``peer``, ``bytes_s``, ``median_bytes_s`` and ``others``, the number of compared
        hosts. None if the host is fast enough, or if fewer than OTHERS_MIN other hosts were measured
        with the same peer.
    """
    comparable = [each for each in others if each.peer == mine.peer and each.host != mine.host]
    for direction in ("sent", "received"):
        rate = getattr(mine, direction)
        rates = [getattr(each, direction) for each in comparable]
        rates = [each for each in rates if each is not None]
        if rate is None or len(rates) < OTHERS_MIN:
            continue
        # With the lower median, at most one of three hosts is rejected.
        median = statistics.median_low(rates)
        if rate < factor * median:
            return {
                "direction": direction,
                "peer": mine.peer,
                "bytes_s": rate,
                "median_bytes_s": median,
                "others": len(rates),
            }
    return None


class HostBandwidth(Part):
    """Measurements of the hosts' bandwidth, and the workers waiting for them."""

    def __init__(self, worlds: Worlds) -> None:
        super().__init__(worlds)
        # Latest measurement of each host, and its time. Entries of rejected hosts are removed, so that these hosts are
        # measured again.
        self._latest: dict[str, tuple[BandwidthMeasured, float]] = {}
        # Hosts whose latest measurement was too slow. They are measured a second time before they are rejected.
        self._doubted: set[str] = set()
        # Hosts waiting for a measurement, with the time at which the wait began.
        self._wanted: dict[str, float] = {}
        # Workers that passed the health check and wait for the measurement of their host, with the time at which the
        # wait began.
        self._waiting: dict[Worker, float] = {}
        self._pending: MeasureBandwidth | None = None  # measurement in progress
        self._result_by = 0.0  # deadline of the measurement in progress
        # peer used in the measurements before the first world
        self._first_peer: str | None = None

    def waits(self, record: WorkerRecord) -> bool:
        return record.worker in self._waiting

    def passed(self, record: WorkerRecord) -> bool:
        """Queue a measurement for the host of a worker that passed the health check, unless it was measured recently.

        Return whether the worker must wait for the result. If so, `settled` yields the worker later.
        """
        if self.settings.health_check != AUTO or not self.settings.bandwidth_factor:
            return False
        hosts = len(self.staff.slots.hosts)
        if not self._can_be_measured(record.worker.host, hosts):
            return False
        if hosts > 1:
            self._wanted.setdefault(record.worker.host, self.actions.now)
        comparable = hosts > 1 + OTHERS_MIN  # hosts other than the peer and the measured host
        if comparable:
            self._waiting[record.worker] = self.actions.now
        return comparable

    def _can_be_measured(self, host: str, hosts: int) -> bool:
        """Return whether the host may be added to the measurement queue, whose length is limited."""
        if not self.worlds.members and hosts > HOSTS_MOST:
            return False  # the first world would wait until all hosts have been measured
        return host in self._wanted or len(self._wanted) < HOSTS_MOST

    def measured(self, event: BandwidthMeasured) -> None:
        pending = self._pending
        if pending is not None and (pending.host, pending.peer) == (event.host, event.peer):
            self._pending = None
            self._latest[event.host] = event, self.actions.now

    def listed(self, hosts: Iterable[str]) -> None:
        """Discard the measurements of hosts that are no longer listed."""
        kept = set(hosts)
        self._latest = {host: each for host, each in self._latest.items() if host in kept}
        self._wanted = {host: since for host, since in self._wanted.items() if host in kept}
        self._doubted &= kept

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which `settled` must be called, because it may yield further workers."""
        if self._pending is not None:
            yield self._result_by
        elif self._wanted:
            # The first measurement waits until the other hosts have passed their health checks.
            yield min(self._wanted.values()) + TOGETHER_S
        yield from (since + WAIT_S for since in self._waiting.values())

    def settled(self) -> Iterator[tuple[WorkerRecord, dict[str, Evidence] | None]]:
        """Request the next measurement, and yield each worker whose wait has ended, with the evidence against its host.

        The evidence, see `too_slow`, is None if the worker is admitted.
        """
        if self._pending is not None and self.actions.expired(self._result_by):
            late = f"no result within {RESULT_S:g} s"
            self.measured(BandwidthMeasured(self._pending.host, self._pending.peer, trouble=late))
        if not self._wanted and not self._waiting:
            return
        self._drop_lost_workers()
        peer = self._peer()
        if self._pending is None and peer is not None:
            self._measure_next(peer)
        # Before the first world, the comparison starts after all hosts have been measured.
        early = not self.worlds.members and bool(self._wanted)
        waiting = dict.fromkeys(worker.host for worker in self._waiting)
        found = {host: self._evidence(host, peer) for host in waiting if host not in self._wanted}
        if not early and self._measure_again(found):
            early = not self.worlds.members
            if self._pending is None and peer is not None:
                self._measure_next(peer)
        for worker, since in [*self._waiting.items()]:
            measured = worker.host in found and not early
            if measured or self.actions.expired(since + WAIT_S):
                del self._waiting[worker]
                yield self.roster[worker], found.get(worker.host)

    def reject(self, host: str) -> None:
        """Discard the measurement of a host that is too slow.

        The host is measured again before its next worker is admitted.
        """
        self._latest.pop(host, None)
        self._doubted.discard(host)

    def _measure_again(self, found: dict[str, dict[str, Evidence] | None]) -> bool:
        """Remove from ``found`` the hosts whose first measurement was too slow, and queue them for a second one.

        Return whether any host was removed.
        """
        first = [host for host, evidence in found.items() if evidence and host not in self._doubted]
        self._doubted -= {host for host, evidence in found.items() if not evidence}
        for host in first:
            del found[host], self._latest[host]
            self._doubted.add(host)
            self._wanted[host] = self.actions.now
        return bool(first)

    def _drop_lost_workers(self) -> None:
        for worker in [*self._waiting]:
            record = self.roster.get(worker)
            if record is None or record.killed_for or not record.in_plans:
                del self._waiting[worker]

    def _peer(self) -> str | None:
        """Return the peer against which hosts are measured, or None if measurements cannot begin yet."""
        for member in self.worlds.members:
            if member in self.roster:
                return member.host
        if self._first_peer not in self.staff.slots.hosts:
            self._first_peer = None
        if self._first_peer is None and self._wanted and self._all_checked():
            self._first_peer = next(host for host in self.staff.slots.hosts if host in self._wanted)
        return self._first_peer

    def _all_checked(self) -> bool:
        """Return whether the health checks before the first world have ended, or their time limit has passed."""
        pending = (each for each in self.roster.in_plans() if each.unchecked)
        late = self.actions.expired(min(self._wanted.values()) + TOGETHER_S)
        return late or all(self.waits(each) for each in pending)

    def _measure_next(self, peer: str) -> None:
        for host in [*self._wanted]:
            if host == peer or self._recent(host, peer):
                del self._wanted[host]
                continue
            self._pending = MeasureBandwidth(next(self._references(host, peer), host), peer)
            self._result_by = self.actions.now + RESULT_S
            self.actions.add(self._pending)
            return

    def _references(self, host: str, peer: str) -> Iterator[str]:
        """Yield hosts of members to measure before ``host``, if too few measurements exist for a comparison."""
        others = [each for each, _ in self._latest.values() if each.host != host]
        if sum(each.peer == peer for each in others) < OTHERS_MIN:
            members = dict.fromkeys(each.host for each in self.worlds.members)
            candidates = [each for each in members if each not in (host, peer)][:REFERENCES]
            yield from (each for each in candidates if not self._has(each, peer))

    def _has(self, host: str, peer: str | None) -> bool:
        known = self._latest.get(host)
        return known is not None and known[0].peer == peer

    def _recent(self, host: str, peer: str) -> bool:
        return self._has(host, peer) and self.actions.now < self._latest[host][1] + FRESH_S

    def _evidence(self, host: str, peer: str | None) -> dict[str, Evidence] | None:
        if not self._has(host, peer):
            return None
        mine, _ = self._latest[host]
        others = (each for each, _ in self._latest.values())
        return too_slow(mine, others, self.settings.bandwidth_factor)
