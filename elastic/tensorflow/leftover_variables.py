"""Destruction of the local variables that a training function leaves behind when a world ends.

Among them are iterators over a ``tf.data.Dataset``. Destroying an iterator waits for TensorFlow's threads, for up to
seven seconds if the dataset tunes itself (``AUTOTUNE``; observed with TensorFlow 2.21). A separate thread therefore
destroys the objects while the next world trains. The process waits for this thread at exit. Otherwise the interpreter
would end the thread on its return from TensorFlow, which would then wait forever for the objects that the thread holds.
"""

from __future__ import annotations

import atexit
import queue
import threading
import traceback
from types import TracebackType
from typing import Any

from elastic.collectives import threads_at_exit

FINISH_S = 20.0

_left: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def frames_of(error: BaseException) -> None:
    """Remove the tracebacks of an exception and its causes, and clear their frames in another thread."""
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
    """Destroy these objects in another thread. This function empties the list.

    The caller must not keep other references.
    """
    global _thread
    with _lock:
        if _thread is None:
            atexit.register(finish)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="elastic-left-behind", daemon=True)
            _thread.start()
    _left.put(found)


def finish(timeout_s: float = FINISH_S) -> None:
    """Wait, at exit, until all objects are destroyed, for at most ``timeout_s`` seconds."""
    _left.put(None)
    if _thread is not None:
        _thread.join(timeout_s)
        if _thread.is_alive():
            threads_at_exit.leave_behind(timeout_s)


def iterator_of(epoch_iterator: Any) -> list[Any]:
    """Return and remove the objects with which Keras 3 reads an epoch's data.

    The objects refer to each other, and would otherwise wait for the garbage collector, which may run in any thread.
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
    # Also breaks reference cycles of frames and exceptions.
    traceback.clear_frames(trace)
