"""Horovod's API, for scripts that were written for Horovod. The implementation is in `elastic`.

``__version__`` is the version of Horovod whose API is provided, for scripts that compare versions. The part after the
``+`` names the implementation.
"""

from __future__ import annotations

from typing import Any

from elastic.conflicting_packages import warn_of_conflicts as _warn_of_others
from horovod.unavailable import refuse_internals as _refuse_internals

_warn_of_others(__name__, __path__[0])

__version__ = "0.28.1+hvd.elastic"

__all__ = ["run"]

_refuse_internals()


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}: see dir(horovod)")
