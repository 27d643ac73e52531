"""Analysis of a script's source: when it calls ``commit()``, and whether a loop around it counts in the state."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from elastic.rendezvous.script_files import script_files
from elastic.script_checks.mistakes import CommitCall

NAMES = ("commit", "CommitStateCallback")
RANKS = {
    *(
        "rank",
        "local_rank",
        "get_rank",
        "RANK",
        "LOCAL_RANK",
        "global_rank",
        "rank_zero",
        "is_rank_zero",
    ),
    *(
        "is_main",
        "is_main_process",
        "main_process",
        "is_master",
        "master_process",
        "master",
        "is_chief",
    ),
}
SCHEDULERS = (
    "sched",
    "lr",
    "warmup",
    "prof",
    "ema",
)  # in the names of objects with a step() that trains nothing
ARGUMENTS = {
    "args",
    "opts",
    "options",
    "config",
    "cfg",
    "environ",
}  # by convention, constant while a script trains
COUNTING = ("range", "trange")
WRAPPERS = ("enumerate", "reversed", "tqdm", "track")  # of a range in the head of a loop
Loop = ast.For | ast.While


def commits(function: Callable[..., Any]) -> list[CommitCall]:
    """Return the calls in the training function, or else in all loaded modules outside installed packages.

    A file that cannot be read may contain calls, so it counts as SOME_STEPS.
    """
    code = inspect.unwrap(function).__code__ if inspect.isfunction(function) else None
    if code is not None:
        own = [*calls_in(_definition(code, _file_of(code)))]
        if own:
            return own
    found = [when for file in script_files(sys.modules) for when in _of_file(Path(file))]
    if not found and code is not None and _names(code):
        return [CommitCall.SOME_STEPS]  # its source file was not sent with it
    return found


def restarting_loop(function: Callable[..., Any]) -> str:
    """Return the head of the loop in the training function that `restarting_loop_in` finds, or ""."""
    if not inspect.isfunction(function):
        return ""
    code = inspect.unwrap(function).__code__
    tree = _file_of(code)
    return restarting_loop_in(_definition(code, tree), tree)


def restarting_loop_in(definition: ast.AST, tree: ast.AST) -> str:
    """Return the head of a loop around commit() that counts in a local variable from a constant, or "".

    ``tree``: the file of the definition, in which functions that receive the state are looked up.

    When the function is called again, such a loop counts from its first value. It is no mistake if anything in
    the loop depends on the state: its bounds, a loop within it, or a condition that skips or ends an
    iteration. Loops within other loops are not judged: how often they run may be decided outside the script.
    """
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return ""
    state = _derived(definition, definition.args.args[0].arg)
    committing = {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and each is not definition and _has_commit(each)
    }

    def outermost(node: ast.AST) -> Iterator[Loop]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.For | ast.While):
                yield child
            else:
                yield from outermost(child)

    for loop in outermost(definition):
        commits_within = _has_commit(loop) or any(
            isinstance(each, ast.Call)
            and _name(each.func) in committing
            and any(_mentions(argument, state) for argument in each.args)
            for each in ast.walk(loop)
        )
        if commits_within and _counts_anew(loop, definition) and not _depends(loop, state):
            word = "for" if isinstance(loop, ast.For) else "while"
            target = f"{ast.unparse(loop.target)} in " if isinstance(loop, ast.For) else ""
            return f"{word} {target}{ast.unparse(_head(loop))}"
    return ""


def _derived(definition: ast.FunctionDef, state: str) -> set[str]:
    """Return the state's name and the local variables that may depend on the state."""
    found = {state}
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


def _counts_anew(loop: Loop, definition: ast.FunctionDef) -> bool:
    """Return whether the loop counts from a constant whenever the function is called."""
    if isinstance(loop, ast.For):
        head = loop.iter
        if isinstance(head, ast.Call) and _name(head.func) in WRAPPERS and head.args:
            head = head.args[0]
        if not isinstance(head, ast.Call) or _name(head.func) not in COUNTING:
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
    """Return whether the state decides how often the loop trains."""
    if _mentions(_head(loop), state):
        return True
    ends = ast.Continue | ast.Break | ast.Return | ast.Raise
    for each in ast.walk(loop):
        if isinstance(each, ast.For | ast.While) and each is not loop:
            if _mentions(_head(each), state):
                return True
        elif isinstance(each, ast.If) and _mentions(each.test, state):
            within = [inner for part in (*each.body, *each.orelse) for inner in ast.walk(part)]
            if any(isinstance(inner, ends) for inner in within) or _calls_step(each):
                return True
    return False


def _file_of(code: CodeType) -> ast.AST:
    """Return the syntax tree of the function's file; an empty one if it cannot be read."""
    try:
        return ast.parse(Path(code.co_filename).read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _definition(code: CodeType, tree: ast.AST) -> ast.AST:
    """Return the function's syntax tree; an empty one if it is not in its file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return ast.Module([], [])


def calls_in(tree: ast.AST) -> Iterator[CommitCall]:
    """Yield when each call of commit() in a syntax tree is made."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or _name(node) not in NAMES:
            continue
        if not isinstance(node, ast.Attribute) or _name(node.value) not in ARGUMENTS:
            yield _when(node, parents)


def _when(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> CommitCall:
    tests: list[ast.expr] = []
    child, parent = node, parents.get(node)
    loop: Loop | None = None
    while parent is not None and not isinstance(parent, ast.FunctionDef | ast.Lambda):
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            other = parent.orelse if child not in _listed(parent.orelse) else parent.body
            if _ranks(parent.test) and not any(_has_commit(each) for each in _listed(other)):
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


def _has_commit(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in NAMES for each in ast.walk(node))


def _ranks(test: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Name | ast.Attribute) and _name(each) in RANKS
        for each in ast.walk(test)
    )


def _steps(loop: Loop) -> bool:
    """Return whether an optimizer's step() is called in this loop, and not in a loop within it."""
    within = [each for each in ast.walk(loop) if isinstance(each, Loop) and each is not loop]
    return _calls_step(loop) and not any(map(_calls_step, within))


def _calls_step(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "step":
            of = _name(node.func.value).lower() if isinstance(node.func, ast.Attribute) else ""
            if not any(each in of for each in SCHEDULERS):
                return True
    return False


def _constant(test: ast.expr, loop: Loop) -> bool:
    """Return whether a condition has the same value in each iteration of the loop."""
    stored = {
        _name(each)
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
            known = {_name(base)} if isinstance(base, ast.Name | ast.Attribute) else set()
            if node.attr in stored or not known & ARGUMENTS:
                return False
    return True


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _names(code: CodeType) -> bool:
    within: Iterable[Any] = code.co_consts
    return any(name in code.co_names for name in NAMES) or any(
        _names(each) for each in within if isinstance(each, CodeType)
    )


def _of_file(file: Path) -> list[CommitCall]:
    try:
        text = file.read_text(errors="replace")
        mentioned = any(name in text for name in NAMES)
        return [*calls_in(ast.parse(text))] if mentioned else []
    except (OSError, SyntaxError, ValueError):
        return [CommitCall.SOME_STEPS]
