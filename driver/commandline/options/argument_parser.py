"""Command-line parsing: an argument parser that raises errors instead of exiting, and value types.

Flags are defined in `flags`.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from elastic.errors import Invalid
from elastic.protocol.islands import parse_islands

T = TypeVar("T")
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

Group = Callable[..., None]
# positional and keyword arguments for a `Group`
Declared = tuple[tuple[Any, ...], dict[str, Any]]

LAUNCH, RAY = FUNCTIONS = ("elastic.launch", "elastic.ray")

# ---- fields that declare flags; see `ArgumentParser.group` for the arguments ------


@dataclass(frozen=True, kw_only=True)
class Use:
    """Declaration of where an option is used in addition to its flag.

    Args:
        functions: names of the functions that accept the option as a keyword argument.
        keyword: name of the keyword argument (default: the name of the field).
        typed: type annotation of the keyword argument (default: the type of the field).
        setting: field of the driver's `Settings` that receives the value.
        for_workers: whether workers also read the option, from the environment variables of its flags.
    """

    functions: tuple[str, ...] = ()
    keyword: str = ""
    typed: str = ""
    setting: str = ""
    for_workers: bool = False


ON_LAUNCH = Use(functions=(LAUNCH,))
EVERYWHERE = Use(functions=FUNCTIONS)


def flag(
    names: str,
    value: str | tuple[str, str],
    text: str,
    convert: Callable[[str], Any] = str,
    *,
    default: Any = None,
    use: Use = Use(),
    **more: Any,
) -> Any:
    """Declare a field for a flag with a value.

    Args:
        names: spellings of the flag, separated by spaces.
        value: placeholder for the value in the help text.
        text: help text.
        convert: function that parses the value.
        default: value of the field if the user does not pass the flag.
    """
    return choice(default, ((names, value, convert, text), more), use=use)


def switch(names: str, text: str, *, use: Use = Use(), **more: Any) -> Any:
    """Declare a field for a flag without a value. The field is True if the user passes the flag."""
    return choice(False, ((names, None, None, text), more), use=use)


def choice(default: Any, *each: Declared, use: Use = Use()) -> Any:
    """Declare a field that one or more flags set. Each flag is a tuple as returned by `given`."""
    return field(default=default, metadata={"flags": each, "use": use})


def given(names: str, value: Any, text: str = argparse.SUPPRESS, **more: Any) -> Declared:
    """Declare one flag of a `choice`, which sets the field to ``value``."""
    return (names, None, None, text), {"action": "store_const", "const": value, **more}


def add_declared(add: Group, kind: Any, *names: str) -> None:
    """Add the flags that the dataclass ``kind`` declares to a group, for all fields or only for ``names``."""
    known = {each.name: each.metadata.get("flags", ()) for each in fields(kind)}
    for name in names or kind.__annotations__:
        for arguments, more in known[name]:
            add(*arguments, dest=name, **more)


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that raises Invalid where argparse would print its usage and exit."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, add_help=False, **rest)
        self.actions: list[argparse.Action] = []
        # for each environment variable, the flag with the same meaning
        self.variables: dict[str, str] = {}
        # for each environment variable, the switch that a value of 1 sets
        self.switches: dict[str, str] = {}
        # For each ``section.key`` of the configuration file, the flag with the same meaning, by value: switches have
        # one flag for true and one for false.
        self.keys: dict[str, dict[str, str]] = {}

    def group(self, title: str, description: str | None = None) -> Group:
        """Add a group, and return a function that adds flags to the group.

        In the returned function, ``variable`` names an environment variable and ``keys`` names entries of the
        configuration file with the same meaning as the flag. For a switch, an entry includes the value that sets the
        switch, as in ``timeline.mark_cycles=true``.
        """
        group = self.add_argument_group(title, description)

        def add(
            names: str,
            value: str | tuple[str, str] | None,
            convert: Callable[[str], object] | None,
            text: str,
            *,
            variable: str = "",
            keys: Sequence[str] = (),
            **rest: Any,
        ) -> None:
            if value is not None:
                rest.update(metavar=value, type=convert)
            elif "action" not in rest:
                rest["action"] = "store_true"
            rest.setdefault("dest", argparse.SUPPRESS)
            action = group.add_argument(
                *names.split(), default=argparse.SUPPRESS, help=text, **rest
            )
            self.actions.append(action)
            flag = next(each for each in action.option_strings if each.startswith("--"))
            if variable:
                targets = self.switches if action.nargs == 0 else self.variables
                targets[variable] = flag
            for key in keys:
                name, _, when = key.partition("=")
                self.keys.setdefault(name, {})[when] = flag

        return add

    def with_one(self, arguments: Sequence[str], options: object, wanted: str) -> str:
        """Parse flags into attributes of ``options``, and return the single positional argument.

        Raises Invalid with the text ``wanted`` if the number of positional arguments is not one.
        """
        own, rest = self.split(arguments)
        words = []
        # Flags may also follow the positional argument, because it is not a program with flags of its own.
        while rest:
            words.append(rest[0])
            more, rest = self.split(rest[1:])
            own = [*own, *more]
        self.parse_args(own, namespace=options)
        if len(words) != 1:
            raise Invalid(wanted)
        return words[0]

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split words into elasticrun's flags and the program.

        The program starts at the first word that is neither a flag nor a flag's value.
        """
        # Do not use argparse.REMAINDER: it would interpret arguments of the user's program as flags of elasticrun.
        takes: dict[str, int] = {}
        for action in self.actions:
            values = action.nargs if isinstance(action.nargs, int) else 1
            takes.update(dict.fromkeys(action.option_strings, values))
        position = 0
        while position < len(arguments):
            word = arguments[position]
            if word == "--":
                return list(arguments[:position]), list(arguments[position + 1 :])
            if not word.startswith("-"):
                break
            position += 1 + takes.get(word, 0)
        return list(arguments[:position]), list(arguments[position:])

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. The error message for an unknown flag suggests the most similar flag."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown and unknown[0].startswith("-"):
            flags = [name for action in self.actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise Invalid(f"unknown flag {unknown[0]}; {hint}")
        if unknown:
            raise Invalid(f"unexpected argument {unknown[0]}: see {self.prog} --help")
        return found

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Even with allow_abbrev=False, argparse accepts -n as an abbreviation of -np. Keep only complete flags, such as
        # -p in -p22.
        found = super()._get_option_tuples(option_string)
        return [each for each in found if option_string.startswith(each[1])]

    def error(self, message: str) -> NoReturn:
        raise Invalid(
            message.removeprefix("argument ").replace("expected one argument", "needs a value")
        )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows ``-np, --num-proc N`` instead of repeating the value after each spelling."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = self._format_args(action, str(action.metavar or "")) if action.nargs != 0 else ""
        return f"{', '.join(action.option_strings)} {value}".strip()


class NameList(argparse.Action):
    """Action of a repeatable flag. Each value may contain several names, separated by commas."""

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        names = [name.strip() for name in values.split(",") if name.strip()]
        if not names:
            raise argparse.ArgumentError(self, "contains no name: pass one, or several, as in a,b")
        setattr(options, self.dest, [*(getattr(options, self.dest) or []), *names])


class IgnoredFlag(argparse.Action):
    """Action that accepts and records a flag that has no effect here.

    Args:
        const: False if the flag disables a feature that this package lacks, otherwise True.
    """

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        options.without_meaning[self.dest] = bool(self.const)


def whole(smallest: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``smallest``."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(
                f"pass a whole number of at least {smallest}, not {text!r}"
            )
        return value

    return convert


def number(text: str) -> float:
    """Parse a finite, nonnegative number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"pass a number of at least 0, not {text!r}")
    return value


def percent(text: str) -> float:
    """Parse a percentage of at least 0 and below 100."""
    value = number(text)
    if value >= 100:
        raise argparse.ArgumentTypeError(f"pass a number of percent below 100, not {text!r}")
    return value


def positive(text: str, what: str = "a number") -> float:
    """Parse a positive, finite number."""
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value == 0.0:
        raise argparse.ArgumentTypeError(f"pass {what} above 0, not {text!r}")
    return value


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    return positive(text, "a number of seconds")


def cores(text: str) -> str:
    """Check a list of core numbers separated by commas, and return it without spaces."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"pass core numbers such as 0,1,2,3, one per worker of a host, not {text!r}"
        )
    return ",".join(words)


def islands(text: str) -> str:
    """Check a specification of islands of hosts, and return it unchanged."""
    try:
        parse_islands(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def log_level(text: str) -> str:
    """Check that a text is one of LOG_LEVELS (case-insensitive), and return it."""
    if text.upper() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a log level: pass one of {', '.join(LOG_LEVELS)}"
        )
    return text.upper()


def or_default(value: T | None, default: T) -> T:
    """Return the value of an option, or the default if the user has not given one."""
    return default if value is None else value
