"""Decides which records a worker sends to the driver, and when. Pure: times are passed in, messages are returned.

    Tracing(on)   --ClockAsked-->  ... ROUND times ...  the clocks are compared
                  --Traced-->      at most WINDOW that the driver has not taken yet; the rest waits in the buffer
    TracesTaken   --Traced-->      room for another
    Tracing(off)  --Traced, ... , TracedAll-->

A driver that does not keep up takes nothing from anybody's training: the buffer is full at some time, and then new
records are dropped. How many is said with the next ones.
"""

from __future__ import annotations

from elastic.monitoring.clock_offset import ClockOffset
from elastic.monitoring.trace_buffer import TraceBuffer
from elastic.protocol import messages
from elastic.protocol.messages import Message, Trace

BATCH = 2_000  # records of a message; about 150 KB
BATCH_BYTES = 1 << 20  # of their names, which a script may choose as it likes
WINDOW = 8  # messages that the driver has not taken yet
ROUND = 8  # questions for the time
AGAIN_NS = 30_000_000_000  # from one round of questions to the next


class TraceSending:
    """One worker's. Its methods are not to be called at the same time."""

    def __init__(self, buffer: TraceBuffer) -> None:
        self.timeline = 0  # the present one's number; 0: none
        self._buffer = buffer
        self._over = False  # it has ended, and what is left has to be sent
        self._under_way = 0  # messages
        self._clock = ClockOffset()  # of the last round that is complete
        self._round = ClockOffset()
        self._round_at_ns = 0

    def receive(self, message: Message, now_ns: int) -> list[Message]:
        """What the driver's word brings about."""
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
            case messages.ClockTold(asked_ns, heard_ns, told_ns):
                return self._told(asked_ns, heard_ns, told_ns, now_ns)
            case _:
                pass
        return []

    def due(self, now_ns: int) -> list[Message]:
        """What is to be sent now."""
        if not self.timeline:
            return []
        self._buffer.tell_lasting(now_ns)
        if not self._clock.known:
            return []  # nobody knows what the times mean
        said: list[Message] = []
        while self._under_way < WINDOW and len(self._buffer):
            said.append(self._batch())
            self._under_way += 1
        if self._over and not len(self._buffer):
            said.append(messages.TracedAll(self.timeline))
            self.timeline = 0
        elif now_ns - self._round_at_ns > AGAIN_NS:
            said.append(self._ask(now_ns))
        return said

    def rest(self, now_ns: int) -> list[Message]:
        """This process ends: whatever is left, taken or not."""
        if not self.timeline:
            return []
        self._buffer.end_all(now_ns)
        if not self._clock.known:
            self._clock = self._round
        said: list[Message] = []
        while self._clock.known and len(self._buffer):
            said.append(self._batch())
        return said

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

    def _told(self, asked_ns: int, heard_ns: int, told_ns: int, now_ns: int) -> list[Message]:
        self._round.add(asked_ns, heard_ns, told_ns, now_ns)
        if self._round.samples < ROUND:
            return [messages.ClockAsked(now_ns)]
        if self._round.known:
            self._clock = self._round
        return self.due(now_ns) if self._over else []


def _fits(records: list[Trace]) -> bool:
    """Whether their names can be sent: a script may have chosen what is endless, or no Unicode."""
    names = [text for _, row, name, _, _ in records for text in (row, name)]
    try:
        return len("".join(names).encode()) <= BATCH_BYTES
    except UnicodeEncodeError:
        return False
