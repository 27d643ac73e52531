"""`python -m elastic.chaos COMMAND`: imports the command's module and passes it its options.

A command is a module of one of the folders here with ``add_arguments(parser)`` and ``main(options) -> int``, its exit
code; it may have a ``DESCRIPTION`` and ``EXAMPLES`` for its help. Only the module of the selected command is imported.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from elastic.errors import Invalid

COMMANDS = {
    "run": "kill, freeze, slow down and disconnect workers of your own job, with a report at the end",
    "check": "check the journal of a job for lost commits and other broken invariants",
    "replay": "replay a journal and compare the decisions",
    "exact": "run a sharded job undisturbed and under faults; compare every commit",
    "simulate": "run thousands of drivers and workers on a virtual clock, under random faults",
    "matrix": "inject every fault in every phase, on real processes",
    "fuzz": "fuzz the control-plane protocol",
    "reductions": "kill and freeze ranks that reduce in shared memory; check every bit",
    "soak": "train for twenty minutes under faults, and look for leaks",
    "hosts": "kill hosts, links, etcd, agents and drivers of a job on several hosts",
}
MODULES = {
    "run": "inject.command",
    "check": "invariants.check",
    "replay": "invariants.replay",
    "exact": "exact.command",
    "simulate": "simulator.command",
    "matrix": "fault_matrix.command",
    "fuzz": "fuzz.command",
    "reductions": "reductions.command",
    "soak": "soak.command",
    "hosts": "hosts.command",
}
WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments`` are those of the process by default."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0 if words else 2
    name, *rest = words
    if name not in COMMANDS:
        print(
            f"python -m elastic.chaos: unknown command {name!r}; choose from {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    called = f"elastic.chaos.{MODULES.get(name, name)}"
    try:
        module = importlib.import_module(called)
    except ModuleNotFoundError as error:
        if error.name != called:
            raise
        print(f"python -m elastic.chaos {name} is not part of this installation", file=sys.stderr)
        return 2
    options = parse(name, module, rest)
    try:
        return int(module.main(options))
    except Invalid as error:
        print(f"python -m elastic.chaos {name}: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        return 128 + stopped.number
    except KeyboardInterrupt:
        return 130


class Stopped(KeyboardInterrupt):
    """A signal requested the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


def heed_signals() -> None:
    """Turn SIGTERM and SIGHUP into `Stopped`, so that a command ends everything that it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def parse(name: str, module: ModuleType, words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one command. The words after ``--`` are a program, for commands that take one."""
    parser = argparse.ArgumentParser(
        prog=f"python -m elastic.chaos {name}",
        description=getattr(module, "DESCRIPTION", f"{COMMANDS[name].capitalize()}."),
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
        parser.error("unexpected program after --")
    return options


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words at the first ``--``."""
    if "--" not in words:
        return list(words), []
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])


def overview() -> str:
    lines = [
        "usage: python -m elastic.chaos COMMAND [options]",
        "",
        "Inject faults into jobs, and report their outcomes.",
        "",
        *(f"  {name:12}{text}" for name, text in COMMANDS.items()),
        "",
        "For details: python -m elastic.chaos COMMAND --help. To start with:",
        "  python -m elastic.chaos run --mean-time-between-faults 20 -- \\",
        "      elasticrun -np 4 --min-np 1 python train.py",
    ]
    return "\n".join(lines)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=WIDTH)


if __name__ == "__main__":
    heed_signals()
    sys.exit(main())
