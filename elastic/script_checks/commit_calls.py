"""Search for ``commit()`` calls in a script's syntax tree, with the conditions under which they run.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from elastic.script_checks.mistakes import CommitCall

NAMES = ("commit", "CommitStateCallback")
# names that contain a rank, or a condition on the rank
RANKS = {
    "rank",
    "local_rank",
    "get_rank",
    "RANK",
    "LOCAL_RANK",
    "global_rank",
    "rank_zero",
    "is_rank_zero",
    "is_main",
    "is_main_process",
    "main_process",
    "is_master",
    "master_process",
    "master",
    "is_chief",
}
# substrings in the names of objects whose step() does not train parameters
SCHEDULERS = ("sched", "lr", "warmup", "prof", "ema")
# names of objects that, by convention, do not change during training
ARGUMENTS = {"args", "opts", "options", "config", "cfg", "environ"}
Loop = ast.For | ast.While


def calls_in(tree: ast.AST) -> Iterator[CommitCall]:
    """Yield a `CommitCall` for each commit() call in a syntax tree."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and name_of(node) in NAMES
        and not (isinstance(node, ast.Attribute) and name_of(node.value) in ARGUMENTS)
    ]
    if found:  # few trees have calls, and the next line takes most of the time
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        yield from (_when(node, parents) for node in found)


def _when(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> CommitCall:
    tests: list[ast.expr] = []
    child, parent = node, parents.get(node)
    loop: Loop | None = None
    while parent is not None and not isinstance(parent, ast.FunctionDef | ast.Lambda):
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            other = parent.orelse if child not in _listed(parent.orelse) else parent.body
            if _ranks(parent.test) and not any(has_commit(each) for each in _listed(other)):
                return CommitCall.SOME_RANKS
            tests.append(parent.test)
        if isinstance(parent, ast.For | ast.While):
            loop = parent
            break
        child, parent = parent, parents.get(parent)
    if loop is None or not _steps(loop) or not all(_constant(test, loop) for test in tests):
        return CommitCall.SOME_STEPS
    return CommitCall.EACH_STEP


def _listed(body: Any) -> list[Any]:
    return body if isinstance(body, list) else [body]


def has_commit(node: ast.AST) -> bool:
    """Return whether commit() is called anywhere in a syntax tree."""
    return any(isinstance(each, ast.Attribute) and each.attr in NAMES for each in ast.walk(node))


def _ranks(test: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Name | ast.Attribute) and name_of(each) in RANKS
        for each in ast.walk(test)
    )


def _steps(loop: Loop) -> bool:
    """Return whether this loop itself, outside of nested loops, calls an optimizer's step()."""
    within = [each for each in ast.walk(loop) if isinstance(each, Loop) and each is not loop]
    return calls_step(loop) and not any(map(calls_step, within))


def calls_step(tree: ast.AST) -> bool:
    """Return whether an optimizer's step() is called anywhere in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) == "step":
            of = name_of(node.func.value).lower() if isinstance(node.func, ast.Attribute) else ""
            if not any(each in of for each in SCHEDULERS):
                return True
    return False


def _constant(test: ast.expr, loop: Loop) -> bool:
    """Return whether a condition has the same value in every iteration of the loop."""
    stored = {
        name_of(each)
        for each in ast.walk(loop)
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    for node in ast.walk(test):
        if isinstance(node, ast.Call | ast.Await | ast.NamedExpr):
            return False
        if isinstance(node, ast.Name) and node.id in stored:
            return False
        if isinstance(node, ast.Attribute):
            base = node.value
            known = {name_of(base)} if isinstance(base, ast.Name | ast.Attribute) else set()
            if node.attr in stored or not known & ARGUMENTS:
                return False
    return True


def name_of(node: ast.AST) -> str:
    """Return the last name or attribute of an expression, such as ``c`` for ``a.b.c``.

    The result is empty for other expressions.
    """
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
