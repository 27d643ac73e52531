"""Warnings about flags of elasticrun that follow the program."""

from __future__ import annotations

from itertools import takewhile

from elastic.driver.commandline.options import flags
from elastic.driver.commandline.options.command_names import called
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.script_flags import ScriptFlags

# Log level at which to report an elasticrun flag that follows a program that may define flags itself.
# The level of the last four options is lower, because programs often define flags with these names.
_MISPLACED = {
    **dict.fromkeys(("num_proc", "min_num_proc", "max_num_proc"), "warning"),
    **dict.fromkeys(
        ("checkpoint_dir", "host_discovery_script", "journal", "output_filename"), "info"
    ),
}


def misplaced_flags(options: Options, path: str | None) -> list[tuple[str, str]]:
    """Return warnings about flags after the program that may have been intended for elasticrun.

    Flags that the program defines, or that were also passed to elasticrun, are omitted.
    """
    given = {word.partition("=")[0] for word in takewhile("--".__ne__, options.command[1:])}
    notes: list[tuple[str, str]] = []
    script: ScriptFlags | None = None
    default = Options()
    for action in flags.parser().actions:
        # Ignore single-letter flags, which are ambiguous, and --help and --version, which most programs define.
        late = [name for name in action.option_strings if name in given and len(name) > 2]
        own = getattr(default, action.dest, None)
        if (
            not late
            or action.dest in ("version", "check_build")
            or not hasattr(default, action.dest)
        ):
            continue
        script = script or ScriptFlags(options.command, module=options.module, path=path)
        level = "warning" if script.known else _MISPLACED.get(action.dest)
        if level and getattr(options, action.dest) == own and not script.defines(late[0]):
            text = f"{late[0]} follows the program, which receives it: put it before {options.command[0]} if it is for"
            notes.append((level, f"{text} {called()}"))
    return notes
