"""Exception hook that suppresses the traceback of an error that the driver has already reported."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from elastic.errors import JobOver
from elastic.protocol.uncaught.at_start import sitecustomize
from elastic.protocol.uncaught.sending import DIAGNOSTICS


def arrange() -> None:
    """Install a hook that suppresses the traceback of an uncaught `JobOver`. Idempotent.

    With ``python -I`` or ``-E``, PYTHONPATH has no effect, so this also installs the hook that sends other uncaught
    exceptions to the agent. If the script has set a hook itself, that hook stays in place.
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
