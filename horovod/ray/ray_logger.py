"""``ray_logger.log({...})`` in a worker calls the callbacks that were passed to ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Set the queue that receives the records of this process by ``put``.

    The default None selects the caller of ``run``.
    """
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Log values of `elastic.report`: None, bool, int, float, str, tensors of one element, lists and dicts of them."""
    if _queue is not None:
        _queue.put(info_dict)
        return
    from elastic.monitoring.reporting import report

    report(info_dict)


__all__ = ["configure", "log"]
