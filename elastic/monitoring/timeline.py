"""What this worker does, written down for the job's timeline. Records; decides nothing, formats nothing, never blocks.

For who calls it. ``on`` is False until somebody wants a timeline: then one look at it is all that a call site pays::

    from elastic.monitoring import timeline

    if timeline.on:
        timeline.begin("allreduce.loss", "NEGOTIATE_ALLREDUCE")

    begin(row, name)               a span begins now in the row of a tensor (any string); spans of a row may be nested
    end(row)                       the innermost span of the row ends now; harmless where none has begun
    span(row, name, a_ns, b_ns)    a span whose both ends are known, on the clock of ``now_ns()``
    spans(rows, name, a_ns, b_ns)  the same span in many rows: the tensors of a fused buffer
    tick(row, rank)                a moment of negotiation: this rank is ready
    cycle()                        CYCLE_START, if cycles are to be marked
    during(row, name)              a context manager around a span; for what takes long anyway
    end_all()                      whatever has begun ends now: its world is gone. `Runtime` calls it after a loss
    now_ns()                       nanoseconds of this worker's monotonic clock

All may be called from any thread; none raises or waits. ``begin`` and ``end`` of a span may be in different threads.
What overlaps in one row without being nested is drawn badly: tensors of one name in two process sets need two rows.
The phases have Horovod's names: ``NEGOTIATE_<OP>`` with a tick per rank, then ``<OP>``, and in it ``QUEUE``,
``MEMCPY_IN_FUSION_BUFFER``, ``GLOO_<OP>`` or ``NCCL_<OP>``, ``MEMCPY_OUT_FUSION_BUFFER``.

The records go to the driver, which writes one file for all workers; see docs/timeline.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from elastic.monitoring.trace_buffer import TraceBuffer

POKE_AT = 2_000  # records that wait, before whoever sends them is woken
CYCLES = "cycles"  # the row of CYCLE_START

on = False  # whether anybody wants records
mark_cycles = False

_buffer = TraceBuffer()
_poke: Callable[[], None] = lambda: None  # noqa: E731

now_ns = time.monotonic_ns


def begin(row: str, name: str) -> None:
    """See the module."""
    _buffer.begin(row, name, now_ns())


def end(row: str) -> None:
    """See the module."""
    _buffer.end(row, now_ns())
    _wake()


def span(row: str, name: str, begin_ns: int, end_ns: int) -> None:
    """See the module."""
    _buffer.add(("X", row, name, begin_ns, end_ns - begin_ns))
    _wake()


def spans(rows: Iterable[str], name: str, begin_ns: int, end_ns: int) -> None:
    """See the module."""
    ns, waited = end_ns - begin_ns, len(_buffer)
    _buffer.extend(("X", row, name, begin_ns, ns) for row in rows)
    if waited < POKE_AT <= len(_buffer):
        _poke()


def tick(row: str, rank: int) -> None:
    """See the module."""
    _buffer.add(("i", row, str(rank), now_ns(), 0))
    _wake()


def cycle() -> None:
    """See the module."""
    if mark_cycles:
        _buffer.add(("i", CYCLES, "CYCLE_START", now_ns(), 0))


def during(row: str, name: str) -> contextlib.AbstractContextManager[None]:
    """See the module."""
    return _During(row, name) if on else _NOTHING


class _During(contextlib.AbstractContextManager[None]):
    __slots__ = ("_name", "_row")

    def __init__(self, row: str, name: str) -> None:
        self._row, self._name = row, name

    def __enter__(self) -> None:
        begin(self._row, self._name)

    def __exit__(self, *error: object) -> None:
        end(self._row)


_NOTHING = contextlib.nullcontext()


def end_all() -> None:
    """See the module."""
    _buffer.end_all(now_ns())


def _wake() -> None:
    if len(_buffer) == POKE_AT:
        _poke()


# ---- for `elastic.monitoring.tracing`, which takes the records away -----------------------------------------


def record(into: TraceBuffer, poke: Callable[[], None], *, cycles: bool) -> None:
    """From now on, into this buffer. ``poke`` is called when many wait; it may come from any thread."""
    global on, mark_cycles, _buffer, _poke
    _buffer, _poke, mark_cycles = into, poke, cycles
    on = True


def stop() -> None:
    """No more. What call sites add that have just looked at ``on`` is still taken."""
    global on, mark_cycles
    on = mark_cycles = False
