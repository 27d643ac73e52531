"""Base class of data loaders, and a mixin that prefetches batches in a thread.

Each iteration over a loader has a separate thread and queue, so that no batch of an abandoned epoch appears in the next
epoch.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

CLOSE_S = 10.0  # timeout for the read in progress to end, in seconds


class BaseDataLoader:
    """Base class of data loaders.

    Subclasses define ``_iterate`` and ``__len__``. They may override ``_process_batch`` to change each batch.
    """

    def __len__(self) -> int:
        """Return the number of batches in one iteration over the loader."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one iteration over the loader."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Mixin that adds prefetching to a data loader.

    It must be the first base class: ``class MyAsyncLoader(AsyncDataLoaderMixin, MyLoader)``.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size is {async_loader_queue_size}: pass the number of batches"
                " to read ahead, or 0 for none"
            )
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size = async_loader_queue_size
        self._ahead: list[_Ahead] = []

    def close_async_loader(self) -> None:
        """Stop all prefetch threads. Idempotent.

        An iteration in progress still yields the batches that were already read.
        """
        for ahead in list(self._ahead):
            ahead.close()
        self._ahead.clear()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        loader: Any = self
        ahead = _Ahead(loader._iterate(), self.async_loader_queue_size)
        self._ahead.append(ahead)
        try:
            for batch in ahead:
                yield loader._process_batch(batch)
        finally:
            ahead.close()
            with contextlib.suppress(ValueError):
                # `close_async_loader` may have removed the entry.
                self._ahead.remove(ahead)


class _Ahead:
    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self._batches = batches
        self._size = size
        self._changed = threading.Condition()
        self._waiting: deque[Any] = deque()
        self._over = False  # whether all batches were read or reading has failed
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="async data loader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._batches:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._size)
                    if self._closed:
                        return
                    self._waiting.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over or self._closed)
                if not self._waiting:
                    break
                batch = self._waiting.popleft()
                self._changed.notify_all()
            yield batch
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            # The thread may be executing user code that reads a batch, which cannot be interrupted.
            self._thread.join(CLOSE_S)


__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
