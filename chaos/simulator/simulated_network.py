"""Simulated TCP connections between the driver and processes on hosts, on the virtual clock.

Messages of one connection arrive in order, after random delays. A connection that breaks loses the last messages in
flight, separately for each direction, and the two sides detect the loss at different times. A host can be cut off in
one direction or both: messages are then held back, as if TCP retransmitted them, until the cut ends or the connection's
liveness timeout expires. Messages of a lost connection may still arrive later ("ghosts"), to test how the driver
handles them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.chaos.simulator.virtual_clock import Clock
from elastic.protocol.messages import Worker

INWARD, OUTWARD = 0, 1  # directions of messages: to the driver, and from the driver
GHOST_S = 6.0  # maximum number of seconds by which a message of a lost connection is delayed

Deliver = Callable[..., None]


class DriverEnd(Protocol):
    """Interface of the driver that the network calls."""

    def can_accept(self) -> bool: ...

    def lost(self, connection: Connection, silent: bool) -> None: ...


@dataclass
class Conditions:
    """Quality of the simulated network: message delays, late arrivals, and the liveness timeout."""

    # maximum delays in seconds; the delay of each message is random
    delays_s: tuple[float, ...] = (0.0005, 0.001, 0.02)
    ghosts: float = 0.0  # fraction of lost messages that arrive late
    lease_s: float = 2.0  # seconds without an acknowledgement after which a connection breaks


class SimulatedNetwork:
    """All connections of one job."""

    def __init__(self, clock: Clock, conditions: Conditions) -> None:
        self.clock = clock
        self.conditions = conditions
        self.messages = 0
        self.driver: DriverEnd
        self.cuts: set[tuple[str, int]] = set()
        # factor by which the delays of each slow host are multiplied
        self.slow: dict[str, float] = {}
        self._of: dict[str, list[Connection]] = {}  # open connections of each host

    def open(self, host: str, lost: Callable[[Connection], None]) -> Connection | None:
        """Open a connection from a process on ``host``. Return None if the driver is currently unreachable."""
        blocked = (host, INWARD) in self.cuts or (host, OUTWARD) in self.cuts
        if blocked or not self.driver.can_accept():
            return None
        connection = Connection(self, host, lost)
        self._of.setdefault(host, []).append(connection)
        return connection

    def drop(self, connection: Connection) -> None:
        mine = self._of.get(connection.host, [])
        if connection in mine:
            mine.remove(connection)

    def connections(self, host: str) -> list[Connection]:
        return list(self._of.get(host, ()))

    def driver_disconnected(self) -> None:
        """Close all connections of a driver that has exited, including pending ones."""
        for connections in list(self._of.values()):
            for connection in list(connections):
                connection.break_off(notify_driver=False)

    def cut(self, host: str, *ways: int) -> None:
        self.cuts.update((host, way) for way in ways)
        self.clock.after(self.conditions.lease_s, self._give_up, host)

    def heal(self, host: str) -> None:
        self.cuts -= {(host, INWARD), (host, OUTWARD)}
        for connection in self.connections(host):
            connection.resume()

    def is_cut(self, host: str) -> bool:
        return (host, INWARD) in self.cuts or (host, OUTWARD) in self.cuts

    def _give_up(self, host: str) -> None:
        if self.is_cut(host):
            for connection in self.connections(host):
                connection.break_off(silent=True)

    def delay(self, host: str) -> float:
        chance, longest = self.clock.random.random, self.conditions.delays_s
        delay = chance() * longest[int(chance() * len(longest))]
        return delay * self.slow.get(host, 1.0) if self.slow else delay


class Connection:
    """One connection between a process and the driver.

    When the connection is lost, ``lost`` is called to notify the process, and `DriverEnd` notifies the driver.
    """

    __slots__ = (
        "_ahead",
        "_arrived",
        "_held",
        "_limit",
        "_lost",
        "_sent",
        "host",
        "network",
        "over",
        "worker",
    )

    def __init__(
        self, network: SimulatedNetwork, host: str, lost: Callable[[Connection], None]
    ) -> None:
        self.network = network
        self.host = host
        self.over = False
        self.worker: Worker | None = None  # worker at the other end, once the driver knows it
        self._lost = lost
        # For each direction: the numbers of the last message sent, the last message that arrived and the last message
        # to deliver, and the time of the latest arrival.
        self._sent = [0, 0]
        self._arrived = [0, 0]
        self._limit: list[float] = [float("inf"), float("inf")]
        self._ahead = [0.0, 0.0]
        # messages in flight, or held back by a cut, in each direction
        self._held: tuple[deque[Any], deque[Any]] = (deque(), deque())

    def send(self, way: int, deliver: Deliver, *args: Any) -> None:
        """Send a message over this connection.

        Args:
            way: direction, to the driver or to the process.
            deliver: called with the connection and ``args`` when the message arrives.
        """
        network = self.network
        network.messages += 1
        if self.over:
            return  # discard: the sender has not yet detected that the connection was lost
        self._sent[way] += 1
        self._held[way].append((self._sent[way], deliver, args))
        if network.cuts and (self.host, way) in network.cuts:
            return
        self._carry(way, self._sent[way])

    def beat(self, deliver: Deliver, *args: Any) -> None:
        """Send a heartbeat to the driver. A heartbeat is not retransmitted and delays no other message."""
        network = self.network
        network.messages += 1
        if not self.over and (self.host, INWARD) not in network.cuts:
            network.clock.after(network.delay(self.host), deliver, self, *args)

    def _carry(self, way: int, number: int) -> None:
        clock = self.network.clock
        time = max(clock.now + self.network.delay(self.host), self._ahead[way])
        self._ahead[way] = time
        clock.at(time, self._arrive, way, number)

    def _arrive(self, way: int, number: int) -> None:
        held = self._held[way]
        while held and held[0][0] <= number:
            number_here, deliver, args = held.popleft()
            if number_here <= self._limit[way]:
                self._arrived[way] = number_here
                deliver(self, *args)

    def flush(self, way: int) -> None:
        """Deliver all messages that were sent in this direction so far, unless a cut holds them back."""
        if (self.host, way) not in self.network.cuts:
            self._arrive(way, self._sent[way])

    def resume(self) -> None:
        """Deliver the messages that were held back while the host was cut off."""
        for way in (INWARD, OUTWARD):
            if self._held[way]:
                self._carry(way, self._sent[way])

    def close(self) -> None:
        """Close the connection after its process has exited.

        Messages in flight arrive before the driver detects the end.
        """
        if not self.over:
            self.send(INWARD, self._closed)
            self.over = True

    def _closed(self, connection: Connection) -> None:
        self.network.drop(self)
        self.network.driver.lost(self, False)

    def break_off(self, *, silent: bool = False, notify_driver: bool = True) -> None:
        """Break the connection and lose the last messages in flight."""
        self.network.drop(self)
        if self.over and not silent:
            return
        clock = self.network.clock
        self.over = True
        for way in (INWARD, OUTWARD):
            under_way = (self.host, way) not in self.network.cuts
            most = self._sent[way] if under_way else self._arrived[way]
            self._limit[way] = clock.random.randint(self._arrived[way], most)
            for number, deliver, args in self._held[way]:
                if number > self._limit[way] and clock.chance(self.network.conditions.ghosts):
                    clock.after(clock.between(0.0, GHOST_S), deliver, self, *args)
        if notify_driver:
            clock.at(
                max(clock.now + clock.between(0.0, 0.05), self._ahead[INWARD]),
                self._notify_driver,
                silent,
            )
        clock.after(clock.between(0.0, 0.05), self._lost, self)

    def _notify_driver(self, silent: bool) -> None:
        self.network.driver.lost(self, silent)


class SimulatedLink:
    """Connections of one process to the driver. When a connection is lost, the process opens a new one."""

    def __init__(
        self,
        network: SimulatedNetwork,
        host: str,
        *,
        opened: Callable[[Connection], None],
        gave_up: Callable[[], None],
        give_up_s: float,
    ) -> None:
        self.connection: Connection | None = None
        self.asleep = False  # whether the process at the other end is frozen
        self.closed = False
        self._network = network
        self._host = host
        self._opened = opened
        self._gave_up = gave_up
        self._give_up_s = give_up_s
        self._alone_since = network.clock.now
        self._wait_s = 0.02
        self._trying = False

    def open(self) -> None:
        self._trying = False
        if self.asleep or self.closed or self.connection is not None:
            return
        self.connection = self._network.open(self._host, self._lost)
        clock = self._network.clock
        if self.connection is not None:
            self._wait_s = 0.02
            self._opened(self.connection)
        elif clock.now - self._alone_since > self._give_up_s:
            self.closed = True
            self._gave_up()
        else:
            self._wait_s = min(0.3, self._wait_s * 2)
            self._try_again()

    def _try_again(self) -> None:
        if not self._trying:
            self._trying = True
            self._network.clock.after(self._network.clock.between(0.0, self._wait_s), self.open)

    def _lost(self, connection: Connection) -> None:
        if connection is self.connection:
            self.connection = None
            self._alone_since = self._network.clock.now
            self._try_again()

    def wake(self) -> None:
        self.asleep = False
        if self.connection is None:
            self._try_again()

    def send(self, deliver: Deliver, *args: Any) -> None:
        if self.connection is not None:
            self.connection.send(INWARD, deliver, *args)

    def close(self) -> None:
        """Close the connection after the process has exited."""
        self.closed = True
        if self.connection is not None:
            self.connection.close()
