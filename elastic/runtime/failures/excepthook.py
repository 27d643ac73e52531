"""Keeps tracebacks off the terminal that would only say, once per worker, what the driver has said. Decides nothing."""

from __future__ import annotations

import sys
from types import TracebackType

from elastic.errors import JobOver


def arrange() -> None:
    """From now on `JobOver`, where nobody catches it, ends the process in silence. Safe to repeat."""
    before = sys.excepthook
    if getattr(before, "quiet_at", None) is JobOver:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, JobOver):
            before(kind, error, trace)

    hook.quiet_at = JobOver  # type: ignore[attr-defined]
    sys.excepthook = hook
