"""Module that Python imports when a worker starts, to install a hook that sends uncaught exceptions to the agent.

The agent puts this folder at the front of PYTHONPATH. The module removes it again, so that neither the script nor its
children see it, and then imports the user's own sitecustomize.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from types import TracebackType


def leave_path(environ: MutableMapping[str, str]) -> None:
    """Remove this folder from PYTHONPATH in ``environ``.

    For a preloaded process, that is the environment it receives.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in paths:
        paths.remove(here)
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        if not paths:
            del environ["PYTHONPATH"]


def arrange() -> None:
    """Install a hook that sends uncaught exceptions. If sending fails, they are printed as usual."""
    process, before = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sent = False
        # Only the worker itself sends exceptions, not its forked children.
        if os.getpid() == process:
            try:
                from elastic.protocol.uncaught import sending

                sent = sending.send(error, os.environ)
            except Exception:  # This interpreter may lack this package or have another version.
                sent = False
        if not sent:
            before(kind, error, trace)

    sys.excepthook = hook


def observe_reads() -> None:
    """Record the paths that the script reads, if the job has a checkpoint folder. See `elastic.protocol.read_paths`."""
    if os.environ.get("ELASTIC_CHECKPOINT_DIR"):
        try:
            from elastic.protocol import read_paths

            read_paths.observe(os.environ)
        except Exception:  # This interpreter may lack this package or have another version.
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
