"""Logger for workers: ``ray_logger.log({...})`` passes values to the callbacks that were passed to ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Set a queue whose ``put`` method receives the values that this process logs.

    If it is None, which is the default, the values are sent to the caller of ``run``.
    """
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Send values to the callbacks that were passed to ``run``.

    As in `elastic.report`, a value may be None, a bool, int, float or str, a one-element tensor, or a list or dict of
    these.
    """
    if _queue is not None:
        _queue.put(info_dict)
        return
    from elastic.monitoring.reporting import report

    report(info_dict)


__all__ = ["configure", "log"]
