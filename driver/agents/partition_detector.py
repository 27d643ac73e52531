"""Distinction between lost hosts and a failure of this driver's own network. Pure: no I/O, no clock.

A driver that reaches no host cannot distinguish the loss of all hosts from a failure of its own network. If its own
network has failed, the hosts keep training without the driver. Therefore, if several hosts were reachable before and
none is reachable now, no host is treated as lost. When one host is reachable again, the deadlines of the other hosts
restart.
"""

from __future__ import annotations


class PartitionDetector:
    """Detector of network partitions, based on the reachability of hosts."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # hosts that were reachable at some time and are not lost
        self._here: set[str] = set()
        # unresponsive hosts that are not treated as lost, because no host is reachable
        self._held: set[str] = set()

    @property
    def cut_off(self) -> bool:
        """Return whether unresponsive hosts are still treated as running because no host is reachable."""
        return bool(self._held)

    def here(self, host: str) -> list[str]:
        """Record that a host is reachable.

        Return the unresponsive hosts that were treated as running until now, whose deadlines must restart.
        """
        self._known.add(host)
        self._here.add(host)
        released, self._held = self._held - {host}, set()
        return sorted(released)

    def expected(self, host: str) -> None:
        """Record that the previous driver could reach a host."""
        self._known.add(host)

    def away(self, host: str) -> None:
        """Record that the connection of a host's agent has ended. The host may return."""
        self._here.discard(host)

    def drop(self, host: str) -> None:
        """Discard a dismissed host, so that its reachability is ignored."""
        for hosts in (self._known, self._here, self._held):
            hosts.discard(host)

    def overdue(self, host: str) -> bool:
        """Return whether a host that did not reconnect in time is lost."""
        self._here.discard(host)
        if host in self._known and not self._here and len(self._known) > 1:
            self._held.add(host)
            return False
        self._known.discard(host)
        return True

    def give_up(self) -> list[str]:
        """Return the unresponsive hosts, which are now lost, because no host became reachable before the timeout."""
        held, self._held = self._held, set()
        self._known -= held
        return sorted(held)
