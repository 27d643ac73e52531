"""Measurement of the time that the training thread waits for torch's DataLoader, through a wrapped method."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from elastic.monitoring.time_account import TimeAccount

_account: TimeAccount | None = None
_thread = 0  # ID of the thread whose waits are counted
_listener: Callable[[Any], None] | None = None


def count(account: TimeAccount) -> None:
    """Start measuring the time that the calling thread waits for any DataLoader.

    This function has no effect if torch lacks the method.
    """
    global _account, _thread
    _account, _thread = account, threading.get_ident()
    from torch.utils.data import dataloader

    iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
    following = getattr(iterator, "__next__", None)
    if iterator is not None and following is not None and not hasattr(following, "counted"):
        iterator.__next__ = _counted(following)


def listen(listener: Callable[[Any], None] | None) -> None:
    """Call ``listener`` in the training thread after each batch.

    Its argument is the DataLoader's iterator, or None at the end of the iterator.

    Pass None as ``listener`` to stop the calls.
    """
    global _listener
    _listener = listener


def stop() -> None:
    """Stop measuring the time that the training thread waits."""
    global _account
    _account = None


def _counted(following: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(following)
    def wrapper(self: Any) -> Any:
        account = _account
        if account is None or account.part != "training" or threading.get_ident() != _thread:
            return following(self)
        try:
            with account.during("data"):
                batch = following(self)
        except StopIteration:
            if _listener is not None:
                _listener(None)
            raise
        if _listener is not None:
            _listener(self)
        return batch

    wrapper.counted = True  # type: ignore[attr-defined]
    return wrapper
