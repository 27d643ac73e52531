"""Analysis of a script's source, if it matches the running code, for ``commit()`` calls and restarting loops."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from elastic.protocol.file_times import changed_since, process_began_at
from elastic.rendezvous.script_files import script_files
from elastic.script_checks import restarting_loops
from elastic.script_checks.commit_calls import NAMES, calls_in, has_commit
from elastic.script_checks.mistakes import CommitCall, RestartingLoop
from elastic.script_checks.restarting_loops import Definition


def commits(function: Callable[..., Any]) -> list[CommitCall]:
    """Return the commit() calls of the training function or, if it has none, of all loaded modules of the script.

    If a file is unreadable or has changed, it may contain calls, so the result is SOME_STEPS.
    """
    code = inspect.unwrap(function).__code__ if inspect.isfunction(function) else None
    if code is not None:
        definition = Sources().of(code)
        own = [] if definition is None else [*calls_in(definition)]
        if own:
            return own
        if definition is None and _names(code):
            # The source file is missing, or was edited after it was loaded.
            return [CommitCall.SOME_STEPS]
    began_at = process_began_at()
    return [when for file in script_files(sys.modules) for when in _of_file(Path(file), began_at)]


def restarting_loop(function: Callable[..., Any]) -> RestartingLoop | None:
    """Return the loop that `restarting_loops` finds in the training function or in functions that it calls, or None."""
    if not inspect.isfunction(function):
        return None
    training = Sources().definition(inspect.unwrap(function))
    return None if training is None else restarting_loops.restarting_loop(training)


class Sources:
    """Cache of the syntax trees of functions, by code object. Each file is read once."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[ast.Module, frozenset[CodeType]]] = {}

    def of(self, code: CodeType) -> ast.FunctionDef | None:
        """Return a function's syntax tree, or None if its file is unreadable or differs from the running code.

        The code itself is compared, because a modification time does not show whether a script was edited before or
        after Python read it.
        """
        tree, compiled = self._file(code.co_filename)
        if code not in compiled:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
        return None

    def definition(self, function: FunctionType) -> Definition | None:
        """Return a function together with the functions that it calls.

        Return None if the function's file is unreadable or differs from the running code.
        """
        code = function.__code__
        node = self.of(code)
        if node is None:
            return None
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        tree, _ = self._file(code.co_filename)
        return Definition(
            node,
            lambda called: self._called(called, function.__globals__, own),
            committing(tree, node),
        )

    def _called(self, called: ast.expr, names: dict[str, Any], own: set[str]) -> Definition | None:
        match called:
            case ast.Name(name) if name not in own:
                found = names.get(name)
            case ast.Attribute(ast.Name(holder), name) if holder not in own:
                held = names.get(holder)
                found = vars(held).get(name) if isinstance(held, ModuleType) else None
            case _:
                return None
        if not inspect.isfunction(found):
            return None
        module = sys.modules.get(found.__module__)
        ours = script_files({found.__module__: module}) if module is not None else []
        return self.definition(found) if ours else None

    def _file(self, file: str) -> tuple[ast.Module, frozenset[CodeType]]:
        if file not in self._files:
            try:
                text = Path(file).read_bytes()
                whole = compile(text, file, "exec", dont_inherit=True)
                self._files[file] = ast.parse(text), frozenset(_all_code(whole))
            except (OSError, SyntaxError, ValueError):
                self._files[file] = ast.Module([], []), frozenset()
        return self._files[file]


def committing(tree: ast.AST, without: ast.AST) -> frozenset[str]:
    """Return the names of all functions in a file that call commit(), except a given one."""
    return frozenset(
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and each is not without and has_commit(each)
    )


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all_code(each)


def _names(code: CodeType) -> bool:
    within: Iterable[Any] = code.co_consts
    return any(name in code.co_names for name in NAMES) or any(
        _names(each) for each in within if isinstance(each, CodeType)
    )


def _of_file(file: Path, began_at: float) -> list[CommitCall]:
    try:
        text = file.read_text(errors="replace")
        if changed_since(str(file), began_at):
            return [CommitCall.SOME_STEPS]
        mentioned = any(name in text for name in NAMES)
        return [*calls_in(ast.parse(text))] if mentioned else []
    except (OSError, SyntaxError, ValueError):
        return [CommitCall.SOME_STEPS]
