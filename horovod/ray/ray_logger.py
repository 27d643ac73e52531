"""Logger of workers: ``ray_logger.log({...})`` calls the callbacks that were passed to ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Set the queue whose ``put`` method receives the records of this process.

    If it is None, which is the default, the records are sent to the caller of ``run``.
    """
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Log values, as `elastic.report` does: None, bool, int, float, str, one-element tensors, lists and dicts of
    these.
    """
    if _queue is not None:
        _queue.put(info_dict)
        return
    from elastic.monitoring.reporting import report

    report(info_dict)


__all__ = ["configure", "log"]
