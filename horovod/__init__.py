"""The door for scripts written for Horovod: its names and its quirks, and nothing else. The work is done in `elastic`.

``__version__`` names the version of Horovod whose API this is; after the ``+`` stands who provides it, so that a
script which compares versions finds what it expects and a reader of a log sees the difference.
"""

from __future__ import annotations

from typing import Any

from elastic.other_packages import warn_of_others as _warn_of_others
from horovod.absent import refuse_internals as _refuse_internals

_warn_of_others(__name__, __path__[0])

__version__ = "0.28.1+hvd.elastic"

__all__ = ["run"]

_refuse_internals()


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
