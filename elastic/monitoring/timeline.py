"""Interface for call sites that add records to this worker's timeline. This module never blocks.

``on`` is False until a timeline is requested, so that a call site costs only one check::

    from elastic.monitoring import timeline

    if timeline.on:
        timeline.begin("allreduce.loss", "NEGOTIATE_ALLREDUCE")

    begin(row, name)               begin a span now in a tensor's row (any string); spans of a row may be nested
    end(row)                       end the innermost span of the row; no effect if none is open
    span(row, name, a_ns, b_ns)    add a span with both ends, on the clock of ``now_ns()``
    spans(rows, name, a_ns, b_ns)  add the same span in many rows: the tensors of a fused buffer
    tick(row, rank)                add an instant of negotiation: this rank is ready
    cycle()                        add CYCLE_START, if the timeline was started with ``mark_cycles``
    during(row, name)              context manager for a span; for slow operations
    end_all()                      end all spans, because their world has ended. `Runtime` calls it after a loss
    now_ns()                       nanoseconds of this worker's monotonic clock

All functions are thread-safe, and none of them raises or waits. ``begin`` and ``end`` of a span may be called in
different threads. Overlapping spans of one row that are not nested are drawn incorrectly: tensors of one name in two
process sets need two rows.

The phases have Horovod's names: ``NEGOTIATE_<OP>`` with a tick per rank, then ``<OP>``, and in it ``QUEUE``,
``MEMCPY_IN_FUSION_BUFFER``, ``GLOO_<OP>`` or ``NCCL_<OP>``, ``MEMCPY_OUT_FUSION_BUFFER``.

The records are sent to the driver, which writes one file for all workers. See docs/timeline.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from elastic.monitoring.trace_buffer import TraceBuffer

POKE_AT = 2_000  # number of buffered records at which the sending thread is woken
CYCLES = "cycles"  # name of the row with CYCLE_START

on = False  # whether a timeline is being recorded
mark_cycles = False

_buffer = TraceBuffer()
_poke: Callable[[], None] = lambda: None  # noqa: E731

now_ns = time.monotonic_ns


def begin(row: str, name: str) -> None:
    """Begin a span in a tensor's row. Spans of a row may be nested. See the module docstring."""
    _buffer.begin(row, name, now_ns())


def end(row: str) -> None:
    """End the innermost span of a row. This function has no effect if no span is open. See the module docstring."""
    _buffer.end(row, now_ns())
    _wake()


def span(row: str, name: str, begin_ns: int, end_ns: int) -> None:
    """Add a span with both ends, in nanoseconds on the clock of `now_ns`. See the module docstring."""
    _buffer.add(("X", row, name, begin_ns, end_ns - begin_ns))
    _wake()


def spans(rows: Iterable[str], name: str, begin_ns: int, end_ns: int) -> None:
    """Add the same span in many rows: those of the tensors of a fused buffer. See the module docstring."""
    ns, waited = end_ns - begin_ns, len(_buffer)
    _buffer.extend(("X", row, name, begin_ns, ns) for row in rows)
    if waited < POKE_AT <= len(_buffer):
        _poke()


def tick(row: str, rank: int) -> None:
    """Add an instant to a row: this rank is ready to run the collective. See the module docstring."""
    _buffer.add(("i", row, str(rank), now_ns(), 0))
    _wake()


def cycle() -> None:
    """Add CYCLE_START, if the timeline was started with ``mark_cycles``. See the module docstring."""
    if mark_cycles:
        _buffer.add(("i", CYCLES, "CYCLE_START", now_ns(), 0))


def during(row: str, name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that adds a span, for slow operations. See the module docstring."""
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
    """End all open spans, because their world has ended. See the module docstring."""
    _buffer.end_all(now_ns())


def _wake() -> None:
    if len(_buffer) == POKE_AT:
        _poke()


# ---- interface for `elastic.monitoring.timeline_transfer`, which sends the records
# ------------------------------------


def record(into: TraceBuffer, poke: Callable[[], None], *, cycles: bool) -> None:
    """Start recording into this buffer. ``poke`` is called, in any thread, when the buffer holds `POKE_AT` records."""
    global on, mark_cycles, _buffer, _poke
    _buffer, _poke, mark_cycles = into, poke, cycles
    on = True


def stop() -> None:
    """Stop recording. Call sites that checked ``on`` just before may still add records."""
    global on, mark_cycles
    on = mark_cycles = False
