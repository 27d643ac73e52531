"""What a training function leaves behind when a world ends: its local variables, until somebody lets go of them.

Among them are iterators over a ``tf.data.Dataset``. To destroy one, TensorFlow waits for its threads, for up to seven
seconds where it tunes itself (``AUTOTUNE``; seen with TensorFlow 2.21). So a thread of our own does that, while the
next world trains. The end of the process waits for it: the interpreter would end the thread where it comes back from
TensorFlow, with what that holds, and TensorFlow would wait for this for ever.
"""

from __future__ import annotations

import atexit
import queue
import threading
import traceback
from types import TracebackType
from typing import Any

from elastic.collectives import threads

FINISH_S = 20.0

_left: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def frames_of(error: BaseException) -> None:
    """Takes the tracebacks from an exception and from those that led to it, and clears their frames, later."""
    found: list[Any] = []
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if each.__traceback__ is not None:
            found.append(each.__traceback__)
            each.__traceback__ = None
        todo += [each.__cause__, each.__context__]
    destroy(found)


def destroy(found: list[Any]) -> None:
    """Lets go of these objects in another thread. The list is emptied there; the caller keeps no other reference."""
    global _thread
    with _lock:
        if _thread is None:
            atexit.register(finish)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="elastic-left-behind", daemon=True)
            _thread.start()
    _left.put(found)


def finish(timeout_s: float = FINISH_S) -> None:
    """At exit: until all are destroyed. After that time the process ends without that."""
    _left.put(None)
    if _thread is not None:
        _thread.join(timeout_s)
        if _thread.is_alive():
            threads.leave_behind(timeout_s)


def iterator_of(epoch_iterator: Any) -> list[Any]:
    """What Keras 3 reads an epoch's data with, which it no longer has then. They refer to each other, and would wait
    for the garbage collector, which runs in whatever thread.
    """
    held = vars(epoch_iterator)
    return [held.pop(name) for name in ("_epoch_iterator", "_current_iterator") if name in held]


def _work() -> None:
    while (found := _left.get()) is not None:
        while found:
            each = found.pop()
            if isinstance(each, TracebackType):
                _clear(each)
            del each


def _clear(trace: TracebackType) -> None:
    for frame, _ in traceback.walk_tb(trace):
        for value in frame.f_locals.values():
            if type(value).__name__.endswith("EpochIterator"):
                iterator_of(value).clear()
    # Also where frames and exceptions refer to each other.
    traceback.clear_frames(trace)
