"""Check, before any process is started, that the program to run exists and is executable."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from elastic.errors import Invalid

_EXAMPLE = "elasticrun -np 4 python train.py"


def run_by_python(command: Sequence[str], python: str) -> list[str]:
    """Return the command, preceded by ``python`` if it is a Python script that is not executable."""
    if command and command[0].endswith(".py") and not _runs_itself(command[0]):
        return [python, *command]
    return [*command]


def check_command(command: Sequence[str], *, path: str | None) -> None:
    """Raise Invalid, with a suggestion, if the program does not exist or is not executable.

    Args:
        command: program and arguments.
        path: value of the environment variable PATH, in which to search for the program.
    """
    if not command:
        raise Invalid(f"no program was given: pass the program after the flags, as in {_EXAMPLE}")
    program = command[0]
    if shutil.which(program, path=path) is None:
        raise Invalid(_why_not(program))
    if os.path.basename(program).startswith("python") and len(command) > 1:
        script = command[1]
        if script == "-":
            raise Invalid(
                "python - reads the script from standard input, which only one process can read: save the"
                " script to a file"
            )
        if script.endswith(".py") and not script.startswith("-") and not os.path.isfile(script):
            raise Invalid(f"{script} does not exist in {os.getcwd()}: pass the path of the script")


def _runs_itself(script: str) -> bool:
    if not (os.path.isfile(script) and os.access(script, os.X_OK)):
        return False
    with open(script, "rb") as file:
        return file.read(2) == b"#!"


def _why_not(program: str) -> str:
    if os.path.isdir(program):
        return f"{program} is a directory: pass a program, as in {_EXAMPLE}"
    if os.path.isfile(program):
        quoted = shlex.quote(program)
        return (
            f"{program} is not executable: run chmod +x {quoted}, or put its interpreter before it"
        )
    if os.sep in program:
        return f"{program} does not exist: pass the path of a program"
    return f"{program} is not on the PATH: check its name, or pass its full path"
