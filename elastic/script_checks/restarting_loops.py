"""Detection of loops around ``commit()`` that restart whenever ``elastic.run`` calls the training function.

Pure: no I/O, no clock.

The check covers the loops in the training function, and in functions of the script that receive the state outside of
any loop that the state may control. A loop is reported only if it certainly restarts. For example, a loop is not
reported if any part of it depends on the state.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from elastic.script_checks.commit_calls import Loop, calls_step, has_commit, name_of
from elastic.script_checks.mistakes import RestartingLoop

COUNTING = ("range", "trange")
# names of functions that may wrap a range in a for statement
WRAPPERS = ("enumerate", "reversed", "tqdm", "track")
DEPTH = 4  # maximum depth of function calls to follow
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass(frozen=True)
class Definition:
    """Function of the script, with the information that the analysis needs.

    Args:
        node: syntax tree of the function.
        called: called with a name or attribute; returns the function of this name, or None if it is unknown.
        committing: names of other functions in the same file that call commit().
    """

    node: ast.FunctionDef
    called: Callable[[ast.expr], Definition | None]
    committing: frozenset[str] = frozenset()


def restarting_loop(training: Definition) -> RestartingLoop | None:
    """Return the first loop of a training function that restarts, or None.

    The first parameter of the function must be the state.
    """
    parameters = training.node.args.args
    return _judge(training, {parameters[0].arg}, DEPTH) if parameters else None


def _judge(of: Definition, given: set[str], depth: int) -> RestartingLoop | None:
    state = _derived(of.node, given)
    local = {each.name: each for each in of.node.body if isinstance(each, ast.FunctionDef)}
    for node in _outside_of_loops(of.node, state):
        if isinstance(node, ast.For | ast.While):
            if (
                _counts_anew(node, of.node)
                and not _depends(node, state)
                and _commits(node, of, state, depth)
            ):
                return RestartingLoop(_head_text(node), of.node.name)
        elif isinstance(node, ast.Call) and depth:
            called = _called(node, of, local)
            receives = None if called is None else _receives(node, called, state)
            if called is not None and receives:
                inherited = state if called.node.name in local else set()
                found = _judge(called, receives | inherited, depth - 1)
                if found is not None:
                    return found
    return None


def _outside_of_loops(node: ast.AST, state: set[str]) -> Iterator[ast.AST]:
    """Yield the loops and calls that every call of the function executes.

    This includes the loops and calls in the body of a ``while True`` with a ``break``, because such a loop usually
    retries its body after an exception.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES):
            continue
        if isinstance(child, ast.If | ast.IfExp) and _mentions(child.test, state):
            continue
        if isinstance(child, ast.For | ast.While):
            yield child
            if _tries_again(child) and not _depends(child, state):
                yield from _outside_of_loops(child, state)
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _outside_of_loops(child, state)


def _tries_again(loop: Loop) -> bool:
    """Return whether the loop is a ``while True`` with a ``break``."""
    endless = (
        isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value
    )
    return bool(endless) and any(isinstance(each, ast.Break) for each in _own(loop))


def _own(loop: Loop) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [*loop.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.For | ast.While | _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _called(call: ast.Call, of: Definition, local: dict[str, ast.FunctionDef]) -> Definition | None:
    if isinstance(call.func, ast.Name) and call.func.id in local:
        found: Definition | None = replace(of, node=local[call.func.id])
    else:
        found = of.called(call.func)
    if found is None or found.node.decorator_list:
        return None
    generates = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(found.node))
    return None if generates else found


def _receives(call: ast.Call, called: Definition, state: set[str]) -> set[str]:
    spread = any(isinstance(each, ast.Starred) for each in call.args)
    if spread or any(each.arg is None for each in call.keywords):
        return set()
    names = [each.arg for each in (*called.node.args.posonlyargs, *called.node.args.args)]
    given = dict(zip(names, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
    return {name for name, value in given.items() if _mentions(value, state)}


def _commits(node: ast.AST, of: Definition, state: set[str], depth: int) -> bool:
    if has_commit(node):
        return True
    for each in ast.walk(node):
        if not isinstance(each, ast.Call):
            continue
        if name_of(each.func) in of.committing and any(_mentions(a, state) for a in each.args):
            return True
        called = of.called(each.func) if depth else None
        receives = None if called is None else _receives(each, called, state)
        if called is not None and receives:
            within = _derived(called.node, receives)
            if _commits(called.node, called, within, depth - 1):
                return True
    return False


def _derived(definition: ast.FunctionDef, given: set[str]) -> set[str]:
    found = {*given}
    assigned = [
        (target, each.value)
        for each in ast.walk(definition)
        if isinstance(each, ast.Assign | ast.AnnAssign | ast.NamedExpr) and each.value is not None
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
    ]
    size = 0
    while size < len(found):
        size = len(found)
        for target, value in assigned:
            if _mentions(value, found):
                found |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


def _mentions(tree: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(tree))


def _head(loop: Loop) -> ast.expr:
    return loop.iter if isinstance(loop, ast.For) else loop.test


def _head_text(loop: Loop) -> str:
    keyword = "for" if isinstance(loop, ast.For) else "while"
    target = f"{ast.unparse(loop.target)} in " if isinstance(loop, ast.For) else ""
    return f"{keyword} {target}{ast.unparse(_head(loop))}"


def _counts_anew(loop: Loop, definition: ast.FunctionDef) -> bool:
    if isinstance(loop, ast.For):
        head = loop.iter
        if isinstance(head, ast.Call) and name_of(head.func) in WRAPPERS and head.args:
            head = head.args[0]
        if isinstance(head, ast.Tuple | ast.List):
            return len(head.elts) > 1 and all(map(_literal, head.elts))
        if not isinstance(head, ast.Call) or name_of(head.func) not in COUNTING:
            return False
        return len(head.args) == 1 or (len(head.args) > 1 and _literal(head.args[0]))
    counted = {
        each.target.id
        for each in ast.walk(loop)
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name)
    }
    starts = [
        each.value
        for each in ast.walk(definition)
        if isinstance(each, ast.Assign)
        and any(isinstance(to, ast.Name) and to.id in counted for to in each.targets)
    ]
    return _mentions(loop.test, counted) and bool(starts) and all(map(_literal, starts))


def _literal(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant)


def _depends(loop: Loop, state: set[str]) -> bool:
    """Return whether the state may determine how many iterations of the loop train."""
    if _mentions(_head(loop), state) or (isinstance(loop, ast.For) and _skips(loop)):
        return True
    ends = ast.Continue | ast.Break | ast.Return | ast.Raise
    for each in ast.walk(loop):
        if isinstance(each, ast.For | ast.While) and each is not loop:
            if _mentions(_head(each), state):
                return True
        elif isinstance(each, ast.If) and _mentions(each.test, state):
            within = [inner for part in (*each.body, *each.orelse) for inner in ast.walk(part)]
            if any(isinstance(inner, ends) for inner in within) or calls_step(each):
                return True
    return False


def _skips(loop: ast.For) -> bool:
    """Return whether the loop skips iterations by comparing its counter with a variable, as in ``if epoch < first``."""
    number = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    for each in _own(loop):
        if isinstance(each, ast.If) and any(isinstance(i, ast.Continue) for i in ast.walk(each)):
            names = {i.id for i in ast.walk(each.test) if isinstance(i, ast.Name)}
            if names & number and names - number:
                return True
    return False
