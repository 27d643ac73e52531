"""Module search paths of an agent that a process of Ray or Spark starts, and of its workers. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.driver.launch.starter import AGENT_MODULE

# The agent must not import the user's modules, neither from its start folder nor through PYTHONPATH. Its ``sys.path``
# is the last argument, from `agents_path`, separated by colons.
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
    """Return the ``sys.path`` of an agent, in which no file of the user can shadow the agent's imports.

    Args:
        own: path of the interpreter.
        package: folder that contains hvd-elastic. If this is also the user's folder, only Python's own modules precede
            it.
        users: entries that the user's code needs.
    """
    library = [entry for entry in own if entry.endswith((".zip", "/lib-dynload"))]
    first = max((own.index(entry) + 1 for entry in library), default=0)
    middle = [] if package in own else [package]
    return list(dict.fromkeys([*own[:first], *middle, *own[first:], *users]))
