"""What Python imports first in a worker: an exception that ends the script is sent to the agent, and not printed here.

The agent puts this folder in front of PYTHONPATH. It is taken out again at once, so that neither the script nor its
children find it, and a sitecustomize of the user's own is imported as it would have been.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from types import TracebackType


def leave_path(environ: MutableMapping[str, str]) -> None:
    """Takes this folder out of PYTHONPATH. A prepared process does so for the environment that it is given."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in paths:
        paths.remove(here)
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        if not paths:
            del environ["PYTHONPATH"]


def arrange() -> None:
    """An exception that nobody catches is sent. Where that fails, it is printed as it would have been."""
    process, before = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sent = False
        if os.getpid() == process:  # a child that was forked is not the worker
            try:
                from elastic.protocol.uncaught import sending

                sent = sending.send(error, os.environ)
            except Exception:  # this interpreter may have another elastic, or none
                sent = False
        if not sent:
            before(kind, error, trace)

    sys.excepthook = hook


def observe_reads() -> None:
    """Of the script, where its job has a checkpoint folder: see `elastic.protocol.read_paths`."""
    if os.environ.get("ELASTIC_CHECKPOINT_DIR"):
        try:
            from elastic.protocol import read_paths

            read_paths.observe(os.environ)
        except Exception:  # this interpreter may have another elastic, or none
            return


def _import_the_next() -> None:
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    leave_path(os.environ)
    arrange()
    observe_reads()
    _import_the_next()
