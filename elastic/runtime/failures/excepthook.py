"""Keeps tracebacks off the terminal that would only say, once per worker, what the driver has said. Decides nothing."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from elastic.errors import JobOver
from elastic.protocol.uncaught.at_start import sitecustomize
from elastic.protocol.uncaught.sending import DIAGNOSTICS


def arrange() -> None:
    """From now on `JobOver`, where nobody catches it, ends the process in silence. Safe to repeat.

    With ``python -I`` and ``-E`` PYTHONPATH had no effect: then what else ends it is sent to the agent from here on. A
    hook that the script has set itself stays.
    """
    if sys.excepthook is sys.__excepthook__ and DIAGNOSTICS in os.environ:
        sitecustomize.leave_path(os.environ)
        sitecustomize.arrange()
    before = sys.excepthook
    if getattr(before, "quiet_at", None) is JobOver:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, JobOver):
            before(kind, error, trace)

    hook.quiet_at = JobOver  # type: ignore[attr-defined]
    sys.excepthook = hook
