"""``ray_logger.log({...})`` in a worker: the callbacks that ``run`` was given are called with it, where ``run`` was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """What is logged in this process goes there, by ``put``; None: to whoever has started the job, as by default."""
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """What `elastic.report` takes: None, bool, int, float, str, tensors of one element, lists and dicts of them.

    Raises NotInitialized (a ValueError) before ``hvd.init()``, and TypeError for any other value.
    """
    if _queue is not None:
        _queue.put(info_dict)
        return
    from elastic.monitoring.reporting import report

    report(info_dict)


__all__ = ["configure", "log"]
