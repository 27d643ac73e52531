"""Module search paths for an agent that Ray or Spark starts, and for its workers. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.driver.launch.starter import AGENT_MODULE

# Prevents the agent from importing the user's modules from the current folder or PYTHONPATH: ``sys.path`` is set to the
# last argument, the entries from `agents_path`, separated by colons.
BOOT = (
    "import runpy, sys; sys.path[:] = sys.argv.pop().split(':');"
    f" runpy.run_module('{AGENT_MODULE}', run_name='__main__', alter_sys=True)"
)


def users_modules(path: Sequence[str], own: Sequence[str], engines: str) -> list[str]:
    """Return the entries of ``sys.path`` that a worker needs in addition to its default path.

    Args:
        path: ``sys.path`` of the process that starts the job.
        own: entries of a worker's default path.
        engines: folder of the engine's own modules.
    """
    known = {*own, ""}
    return list(
        dict.fromkeys(
            entry
            for entry in path
            if entry not in known and entry != engines and not entry.startswith(f"{engines}/")
        )
    )


def agents_path(own: Sequence[str], package: str, users: Sequence[str]) -> list[str]:
    """Return a ``sys.path`` for an agent in which the user's files cannot shadow the agent's imports.

    Args:
        own: entries of the interpreter's default path.
        package: folder that contains hvd-elastic. If it is also the user's folder, it follows Python's own modules.
        users: entries that the user's code needs.
    """
    library = [entry for entry in own if entry.endswith((".zip", "/lib-dynload"))]
    first = max((own.index(entry) + 1 for entry in library), default=0)
    middle = [] if package in own else [package]
    return list(dict.fromkeys([*own[:first], *middle, *own[first:], *users]))
