"""A Python process that has imported what a worker will need, and waits to be told what to run.

    python -c "... main()" FOLDER TOLD WHAT MODULES SCRIPT ROOM

FOLDER: where a script looks for modules first, its own or, with -m, that in which it is started.

TOLD: a pipe; one byte says that WHAT, an open file, holds the command, what of it is run, environment and folder, as
JSON; its end says that nobody needs this process. MODULES: names with commas between them, `auto` among them for what
SCRIPT imports before it does anything else. ROOM: long, so that the command line of what is run later fits in its
place.

What it then runs finds a process as it would have been started: its own arguments, environment, folder, ``__main__``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

AUTO = "auto"
OURS = (
    "torch",
    "torch._dynamo",  # which the first optimizer imports, and torch does not
    *("elastic.data.loader", "elastic.run_loop", "elastic.runtime.basics"),
    *("elastic.optimizer.distributed_optimizer", "elastic.optimizer.adasum_optimizer"),
    *("elastic.state.torch_state", "elastic.state.newcomer"),
    *("elastic.collectives.cpu", "elastic.collectives.shared_memory.process_group"),
)
PR_SET_MM, PR_SET_MM_ARG_END = 35, 9


def leading_imports(source: str) -> Iterator[str]:
    """Names of modules that a script imports before anything else. What comes first may decide what an import does."""
    for number, node in enumerate(ast.parse(source).body):
        match node:
            case ast.Import():
                yield from (each.name for each in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                if module != "__future__":
                    yield module
            case ast.ImportFrom():
                pass  # of its own package
            case ast.Expr(ast.Constant()) if number == 0:
                pass  # the docstring
            case _:
                return


def prepare(modules: str, script: str) -> None:
    """Imports what there is; a worker that needs the rest says so itself."""
    names = [name for name in modules.split(",") if name != AUTO]
    if AUTO in modules.split(",") and script:
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            siblings = {path.stem for path in Path(script).parent.iterdir()}
            found = leading_imports(Path(script).read_text())
            names += [name for name in found if name.split(".")[0] not in siblings]
    for name in (*OURS, *names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def become(words: Sequence[str], environ: dict[str, str], folder: str | None) -> None:
    """Has the command line, environment and folder of what it is to run."""
    coerced = os.environ.get("LC_CTYPE")  # the interpreter may have set it: PEP 538
    os.environ.clear()
    os.environ.update(environ)
    if coerced is not None:
        os.environ.setdefault("LC_CTYPE", coerced)
    if folder is not None:
        os.chdir(folder)
    with contextlib.suppress(OSError, ValueError):
        _show(words)


def _show(words: Sequence[str]) -> None:
    """In /proc/PID/cmdline, for `ps` and whoever looks for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    line = line if len(line) <= end - begin else line[: end - begin - 1] + b"\0"
    ctypes.memmove(begin, line + bytes(end - begin - len(line)), end - begin)
    shorter = ctypes.c_ulong(begin + len(line))
    ctypes.CDLL(None).prctl(PR_SET_MM, PR_SET_MM_ARG_END, shorter, 0, 0)  # if it may


def run(words: Sequence[str]) -> None:
    """As ``python SCRIPT ...`` or ``python -m MODULE ...``, ``words`` from SCRIPT or -m on."""
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = [*words]
    path = os.path.abspath(words[0])
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    script = ModuleType("__main__")
    script.__file__ = path
    script.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = script
    code = compile(Path(path).read_bytes(), path, "exec")
    try:
        exec(code, script.__dict__)
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        error.__traceback__ = trace.tb_next  # without this file
        sys.excepthook(type(error), error, trace.tb_next)
        sys.exit(1)


def main() -> None:
    modules, script = sys.argv[4:6]
    prepare(modules, script)
    told, what = map(int, sys.argv[2:4])
    if not os.read(told, 1):
        return
    os.close(told)
    with open(what, "rb") as file:
        file.seek(0)
        command, words, environ, folder = json.load(file)
    become(command, environ, folder)
    run(words)
