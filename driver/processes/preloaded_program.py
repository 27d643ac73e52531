"""Preloaded Python process, which imports the modules that a worker needs and then waits for the worker's command.

    python -c "... main()" FOLDER TOLD WHAT MODULES SCRIPT ROOM

FOLDER: the first entry of sys.path, which is the folder of the script or, with -m, the worker's working folder.
TOLD: a pipe. One byte means that WHAT, an open file, holds the command, the part of it to run, the environment
and the folder, as JSON. End of file means that the process is not needed. MODULES: names separated by commas;
`auto` stands for the modules that SCRIPT, or the module NAME of "-m NAME", imports before any other statement.
ROOM: padding, so that the worker's command line fits in the place of this one.

The worker's script sees its usual arguments, environment, working folder and ``__main__``, as in a newly started
process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from elastic.protocol.uncaught.at_start import sitecustomize

AUTO, MODULE = "auto", "-m "
TORCH = "torch"
OURS = (
    TORCH,
    "torch._dynamo",  # torch itself imports this module only when the first optimizer is created
    *("elastic.data.loader", "elastic.run_loop", "elastic.runtime.basics"),
    *("elastic.optimizer.distributed_optimizer", "elastic.optimizer.adasum_optimizer"),
    *("elastic.state.torch_state", "elastic.state.join_preparation"),
    *("elastic.collectives.groups.cpu", "elastic.collectives.shared_memory.process_group"),
)
PR_SET_MM, PR_SET_MM_ARG_END = 35, 9
OOM_SCORE = "/proc/self/oom_score_adj"
OOM_FIRST = "1000"  # score with which a process is the first target of the out-of-memory killer


def leading_imports(source: str, own: Collection[str] = ()) -> tuple[list[str], bool]:
    """Find the modules that a source file imports before any other statement.

    Returns:
        The names of the modules, and whether the file consists only of imports.

    The search stops at the first statement that is not an import, because it may affect later imports, and at the first
    import of a module in ``own``. ``own`` contains the modules of the script's package or folder.

    Raises:
        SyntaxError: ``source`` is not valid Python.
    """
    names: list[str] = []
    for number, node in enumerate(ast.parse(source).body):
        match node:
            case ast.Import():
                found = [each.name for each in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                found = [] if module == "__future__" else [module]
            # The first statement may be a docstring.
            case ast.Expr(ast.Constant()) if number == 0:
                found = []
            case _:
                return names, False
        for name in found:
            if name.partition(".")[0] in own:
                return names, False
            names.append(name)
    return names, True


def sources(script: str) -> list[Path]:
    """Return the files that ``python SCRIPT`` or ``python -m NAME`` (``-m NAME``) executes, in order.

    With -m, these include the ``__init__.py`` of each package before the module. The files are not imported.
    """
    if not script.startswith(MODULE):
        return [Path(script)]
    first, *rest = script.removeprefix(MODULE).split(".")
    spec = importlib.util.find_spec(first)
    if spec is None or spec.origin is None:
        return []
    place, found = Path(spec.origin).parent, [Path(spec.origin)]
    for name in rest:
        package = place / name / "__init__.py"
        place, found = place / name, [*found, package if package.exists() else place / f"{name}.py"]
    return [*found, place / "__main__.py"] if found[-1].name == "__init__.py" else found


def script_imports(script: str, folder: str) -> list[str]:
    """Return the modules that the source files of a script import before any other statement.

    Raises:
        OSError: a file or the folder cannot be read.
        SyntaxError, ValueError: a file is not valid Python.
    """
    own = {path.stem for path in Path(folder).iterdir()}
    own |= {script.removeprefix(MODULE).partition(".")[0]}
    names: list[str] = []
    for source in sources(script):
        found, whole = leading_imports(source.read_text(), own)
        names += found
        if not whole:
            break
    return names


def prepare(modules: str, script: str, folder: str) -> None:
    """Import the given modules. Errors are ignored, because they occur again when the worker's script imports them.

    With ``auto`` alone, torch and this package are imported only if the script imports torch before any other
    statement. Otherwise, the script may first set variables that torch reads when it is imported.
    """
    wanted = modules.split(",")
    names = [name for name in wanted if name != AUTO]
    if names:
        _import(OURS)
    if AUTO in wanted:
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            names += script_imports(script, folder)
    _import(names)
    if TORCH in sys.modules:
        _import(OURS)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def offer_to_oom_killer() -> str | None:
    """Make this process the first target of the out-of-memory killer.

    Returns the previous score adjustment, to be restored later, or None if it could not be changed.
    """
    try:
        with open(OOM_SCORE, "r+") as file:
            before = file.read()
            file.seek(0)
            file.write(OOM_FIRST)
    except OSError:
        return None
    return before


def become(
    words: Sequence[str], environ: Mapping[str, str], folder: str | None, oom_score: str | None
) -> None:
    """Turn this process into the worker: adopt its command line, environment, folder and out-of-memory score."""
    if oom_score is not None:
        with contextlib.suppress(OSError):
            Path(OOM_SCORE).write_text(oom_score)
    coerced = os.environ.get("LC_CTYPE")  # The interpreter may have set this variable (PEP 538).
    os.environ.clear()
    os.environ.update(environ)
    if coerced is not None:
        os.environ.setdefault("LC_CTYPE", coerced)
    if folder is not None:
        os.chdir(folder)
    with contextlib.suppress(OSError, ValueError):
        _show(words, environ)


def _show(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Make the worker's command line and environment visible in /proc/PID/cmdline and /proc/PID/environ.

    `ps`, and tools that look for a worker's rank, read these files.

    This does not overwrite libc's environment, because os.environ.clear() has removed the original variables, and
    setenv() has allocated new ones elsewhere.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, variables_begin, variables_end = map(int, fields[45:49])
    line = _strings(words)
    line = line if len(line) <= end - begin else line[: end - begin - 1] + b"\0"
    ctypes.memmove(begin, line + bytes(end - begin - len(line)), end - begin)
    shorter = ctypes.c_ulong(begin + len(line))
    # If the process lacks the permission, this call fails, and `ps` shows padding after the command.
    ctypes.CDLL(None).prctl(PR_SET_MM, PR_SET_MM_ARG_END, shorter, 0, 0)
    block, room = (
        _strings([f"{n}={text}" for n, text in environ.items()]),
        variables_end - variables_begin,
    )
    if len(block) <= room:
        ctypes.memmove(variables_begin, block + bytes(room - len(block)), room)


def _strings(words: Iterable[str]) -> bytes:
    return b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)


def run(words: Sequence[str]) -> None:
    """Run a program like ``python SCRIPT ...`` or ``python -m MODULE ...``. ``words`` begins with SCRIPT or -m."""
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
        error.__traceback__ = trace.tb_next  # Omit the frame of this file from the traceback.
        sys.excepthook(type(error), error, trace.tb_next)
        sys.exit(1)


def main() -> None:
    folder, modules, script = sys.argv[1], *sys.argv[4:6]
    score = offer_to_oom_killer()
    prepare(modules, script, folder)
    pipe, what = map(int, sys.argv[2:4])
    if not os.read(pipe, 1):
        return
    os.close(pipe)
    with open(what, "rb") as file:
        file.seek(0)
        command, words, environ, workdir = json.load(file)
    become(command, environ, workdir, score)
    sitecustomize.leave_path(os.environ)
    sys.orig_argv = [*command]
    sitecustomize.observe_reads()
    run(words)
