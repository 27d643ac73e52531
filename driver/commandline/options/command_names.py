"""Names of this program and its commands, and suggestions for misspelled commands."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from elastic.errors import Invalid

NAMES = ("elasticrun", "horovodrun")
COMMANDS = ("jobs", "status", "scale", "drain", "remove", "stacks", "logs", "stop")
OTHER_COMMANDS = ("agent", "secret", "k8s", "explain", "replay", "checkpoints", "docs", "doctor")
# The output of these commands may be piped to a program that exits early, such as `head`.
PIPED_COMMANDS = (*COMMANDS, *OTHER_COMMANDS[2:])
PROGRAM_ALIKE = (
    0.75  # minimum similarity (0 to 1) between a program name and a command to suggest the command
)


def check_first_word(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise Invalid if the first word is a misspelled command, which would otherwise be run as a program."""
    word = arguments[0] if arguments else ""
    if (
        word[:1] in ("", "-")
        or os.path.exists(word)
        or shutil.which(word, path=environ.get("PATH"))
    ):
        return
    near = _nearest_command(word)
    hint = f"did you mean elasticrun {near}?" if near else "see elasticrun --help"
    raise Invalid(f"{word} is neither an elasticrun command nor a program; {hint}")


def _nearest_command(word: str, alike: float = 0.6) -> str:
    near = difflib.get_close_matches(word, [*COMMANDS, *OTHER_COMMANDS], 1, alike)
    return near[0] if near else ""


def command_meant(command: Sequence[str]) -> str:
    """Suggest a command if a program name, such as ``stat``, may be misspelled. Otherwise return an empty string."""
    near = _nearest_command(command[0], PROGRAM_ALIKE) if command else ""
    return f"; or did you mean elasticrun {near}?" if near else ""


def called() -> str:
    """Return the name by which the user called this program, ``elasticrun`` or ``horovodrun``."""
    name = os.path.basename(sys.argv[0])
    return name if name in NAMES else NAMES[0]
