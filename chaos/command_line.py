"""Command lines of the form `PROGRAM COMMAND [options]`.

A command is a module with ``add_arguments(parser)`` and ``main(options) -> int``, which returns the exit code. The
module may define ``DESCRIPTION`` and ``EXAMPLES`` for the help text. Only the module of the selected command is
imported.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from elastic.errors import Invalid

WIDTH = 100


@dataclass(frozen=True)
class CommandLine:
    """Command-line interface of a program with several commands.

    Args:
        examples: lines printed at the end of the program's help.
    """

    program: str
    purpose: str
    commands: Mapping[str, tuple[str, str]]  # module and description of each command, by name
    examples: Sequence[str] = ()

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command named by the first argument, and return its exit code.

        Args:
            arguments: words of the command line. The default is ``sys.argv[1:]``.
        """
        words = list(sys.argv[1:] if arguments is None else arguments)
        if not words or words[0] in ("-h", "--help"):
            print(self.overview())
            return 0 if words else 2
        name, *rest = words
        if name not in self.commands:
            print(
                f"{self.program}: unknown command {name!r}; choose from {', '.join(self.commands)}",
                file=sys.stderr,
            )
            return 2
        module = importlib.import_module(self.commands[name][0])
        options = self.parse(name, module, rest)
        try:
            return int(module.main(options))
        except Invalid as error:
            print(f"{self.program} {name}: {error}", file=sys.stderr)
            return 2
        except Stopped as stopped:
            return 128 + stopped.number
        except KeyboardInterrupt:
            return 130

    def parse(self, name: str, module: ModuleType, words: Sequence[str]) -> argparse.Namespace:
        """Parse the options of one command. For commands that run a program, the program follows ``--``."""
        parser = argparse.ArgumentParser(
            prog=f"{self.program} {name}",
            description=getattr(module, "DESCRIPTION", f"{self.commands[name][1].capitalize()}."),
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        module.add_arguments(parser)
        own, program = split(words)
        options = parser.parse_args(own)
        if hasattr(options, "command"):
            options.command = program
        elif program:
            parser.error("unexpected program after --: omit the program")
        return options

    def overview(self) -> str:
        lines = [
            f"usage: {self.program} COMMAND [options]",
            "",
            self.purpose,
            "",
            *(f"  {name:12}{text}" for name, (_, text) in self.commands.items()),
            "",
            f"For details: {self.program} COMMAND --help.{' To start with:' if self.examples else ''}",
            *(f"  {line}" for line in self.examples),
        ]
        return "\n".join(lines)


class Stopped(KeyboardInterrupt):
    """Exception raised when a signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


def heed_signals() -> None:
    """Make SIGTERM and SIGHUP raise `Stopped`, so that a command can end the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line words at the first ``--``. Return the words before it and the words after it."""
    if "--" not in words:
        return list(words), []
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=WIDTH)
