"""Flow control of the timeline records that a worker sends to the driver.

Pure: times are passed in, messages are returned.

    Tracing(on)      --ClockAsked-->    ... ROUND times ...  the clocks are compared
                     --Traced-->        at most WINDOW in flight; the rest waits in the buffer
    TracesTaken      --Traced-->        another one may be sent
    Tracing(off)     --Traced, ... , TracedAll-->

A slow driver does not slow down training: once the buffer is full, new records are dropped, and their number is sent
with the next ones.
"""

from __future__ import annotations

from elastic.monitoring.clock_offset import ClockOffset
from elastic.monitoring.trace_buffer import TraceBuffer
from elastic.protocol import messages
from elastic.protocol.messages import Message, Trace

BATCH = 2_000  # maximum number of records per message, about 150 KB
# Maximum total size of the names in one message in bytes, because scripts may choose long names.
BATCH_BYTES = 1 << 20
WINDOW = 8  # maximum number of messages in flight
ROUND = 8  # number of requests for the driver's clock per round
AGAIN_NS = 30_000_000_000  # nanoseconds between two rounds of requests


class TraceSending:
    """Sender of the records of one worker. Not thread-safe."""

    def __init__(self, buffer: TraceBuffer) -> None:
        self.timeline = 0  # number of the current timeline, or 0 if there is none
        self._buffer = buffer
        self._over = False  # whether the timeline has ended and the remaining records must be sent
        self._under_way = 0  # number of messages in flight
        self._clock = ClockOffset()  # offset of the driver's clock from the last complete round
        self._round = ClockOffset()
        self._round_at_ns = 0

    def receive(self, message: Message, now_ns: int) -> list[Message]:
        """Return the messages that answer a message from the driver."""
        match message:
            case messages.Tracing(timeline, True):
                return self._begin(timeline, now_ns)
            case messages.Tracing(timeline, False):
                if timeline != self.timeline:
                    return [messages.TracedAll(timeline)]
                self._over = True
                return self.due(now_ns)
            case messages.TracesTaken(timeline):
                if timeline == self.timeline:
                    self._under_way = max(0, self._under_way - 1)
                    if self._over or len(self._buffer) >= BATCH:
                        return self.due(now_ns)
            case messages.ClockTold(asked_ns, received_ns, sent_ns):
                return self._receive_clock(asked_ns, received_ns, sent_ns, now_ns)
            case _:
                pass
        return []

    def due(self, now_ns: int) -> list[Message]:
        """Return the messages to send now."""
        if not self.timeline:
            return []
        self._buffer.report_open_spans(now_ns)
        if not self._clock.known:
            return []  # Without a clock offset, times cannot be converted yet.
        due: list[Message] = []
        while self._under_way < WINDOW and len(self._buffer):
            due.append(self._batch())
            self._under_way += 1
        if self._over and not len(self._buffer):
            due.append(messages.TracedAll(self.timeline))
            self.timeline = 0
        elif now_ns - self._round_at_ns > AGAIN_NS:
            due.append(self._ask(now_ns))
        return due

    def rest(self, now_ns: int) -> list[Message]:
        """Return all remaining records, at the exit of the process."""
        if not self.timeline:
            return []
        self._buffer.end_all(now_ns)
        if not self._clock.known:
            self._clock = self._round
        remaining: list[Message] = []
        while self._clock.known and len(self._buffer):
            remaining.append(self._batch())
        return remaining

    def _begin(self, timeline: int, now_ns: int) -> list[Message]:
        if timeline != self.timeline:
            self._buffer.clear()
        self.timeline, self._over, self._under_way = timeline, False, 0
        return [self._ask(now_ns)]

    def _batch(self) -> messages.Traced:
        records = self._buffer.take(BATCH)
        dropped = self._buffer.take_dropped()
        if not _fits(records):
            dropped, records = dropped + len(records), []
        return messages.Traced(self.timeline, self._clock.offset_ns, records, dropped)

    def _ask(self, now_ns: int) -> messages.ClockAsked:
        self._round, self._round_at_ns = ClockOffset(), now_ns
        return messages.ClockAsked(now_ns)

    def _receive_clock(
        self, asked_ns: int, received_ns: int, sent_ns: int, now_ns: int
    ) -> list[Message]:
        self._round.add(asked_ns, received_ns, sent_ns, now_ns)
        if self._round.samples < ROUND:
            return [messages.ClockAsked(now_ns)]
        if self._round.known:
            self._clock = self._round
        return self.due(now_ns) if self._over else []


def _fits(records: list[Trace]) -> bool:
    """Return whether the names, chosen by a script, are valid Unicode and not too long."""
    names = [text for _, row, name, _, _ in records for text in (row, name)]
    try:
        return len("".join(names).encode()) <= BATCH_BYTES
    except UnicodeEncodeError:
        return False
