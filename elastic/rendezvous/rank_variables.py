"""Environment variables that contain a worker's place in the world, and detection of script lines that read them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

from elastic.protocol.messages import Place
from elastic.rendezvous.script_files import script_files

# Not updated, like HOROVOD_LOCAL_RANK: it contains the slot, which selects the GPU and never changes for a worker.
SLOT = "LOCAL_RANK"
_READ = (SLOT, "RANK", "WORLD_SIZE")
_RANK = ("RANK", "ROLE_RANK", "HOROVOD_RANK")
_SIZE = ("WORLD_SIZE", "ROLE_WORLD_SIZE", "HOROVOD_SIZE")


class VariableRead(NamedTuple):
    """Line of a script that reads an environment variable with a rank or a world size."""

    file: str
    line: int
    name: str


def of(place: Place) -> dict[str, str]:
    """Return the values for a place of all variables that depend on the world, by name."""
    values = {name: str(place.rank) for name in _RANK}
    values |= {name: str(place.size) for name in _SIZE}
    values |= {
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.cross_rank),
        "GROUP_WORLD_SIZE": str(place.cross_size),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
    }
    return values


def follow(place: Place, environ: MutableMapping[str, str] | None = None) -> None:
    """Update the existing variables to their values in the current world.

    Other variables are not created, and correct values are not written again, because other threads may be reading the
    environment.
    """
    env = os.environ if environ is None else environ
    for name, value in of(place).items():
        if name in env and env[name] != value:
            env[name] = value


def stale(
    place: Place, environ_at_start: Mapping[str, str], reads: Iterable[VariableRead]
) -> list[VariableRead]:
    """Return the ``reads`` of variables whose value for ``place`` differs from the value when this worker started.

    Reads of LOCAL_RANK are included only on rank 0, and only if its slot is not 0: scripts treat the worker with
    LOCAL_RANK 0 as rank 0.
    """
    values = of(place)
    values[SLOT] = "0" if place.rank == 0 else environ_at_start.get(SLOT, "")
    return [
        read
        for read in reads
        if read.name in environ_at_start and environ_at_start[read.name] != values[read.name]
    ]


def reads_in(file: str, text: str) -> Iterator[VariableRead]:
    """Yield the lines of a source file that may use a value from an earlier world.

    These are lines that assign the value of RANK or WORLD_SIZE from the environment to a Python variable, or that test
    LOCAL_RANK or a Python variable of that name.
    """
    if not any(f"{quote}{name}{quote}" in text for name in _READ for quote in "'\""):
        # Skip most files without parsing them: parsing takes milliseconds, during which other ranks wait.
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    found: set[VariableRead] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            found |= {VariableRead(file, node.lineno, name) for name in _named(node.value) - {SLOT}}
        elif isinstance(node, ast.Compare | ast.Not | ast.If | ast.IfExp | ast.UnaryOp):
            tested = node.test if isinstance(node, ast.If | ast.IfExp) else node
            line = getattr(node, "lineno", 0)
            if line and _is_slot(tested):
                found.add(VariableRead(file, line, SLOT))
    yield from sorted(found, key=lambda read: (read.line, read.name))


def _named(tree: ast.AST) -> set[str]:
    constants = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    return {each for each in constants if isinstance(each, str) and each in _READ}


def _is_slot(test: ast.AST) -> bool:
    """Return whether a condition tests the local rank itself, such as ``local_rank == 0`` or ``not local_rank``."""
    if isinstance(test, ast.Compare):
        return any(_is_local_rank(each) for each in (test.left, *test.comparators))
    return (
        isinstance(test, ast.UnaryOp)
        and isinstance(test.op, ast.Not)
        and _is_local_rank(test.operand)
    )


def _is_local_rank(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.lower() == "local_rank" or (not name and SLOT in _named(node))


def reads_of_script(modules: Mapping[str, object] | None = None) -> list[VariableRead]:
    """Return all lines in the script's own modules that may use a value from an earlier world. See `reads_in`."""
    found: list[VariableRead] = []
    for file in script_files(sys.modules if modules is None else modules):
        try:
            with open(file, encoding="utf-8", errors="replace") as source:
                found.extend(reads_in(file, source.read()))
        except OSError:
            continue  # The file was deleted after it was imported.
    return found
