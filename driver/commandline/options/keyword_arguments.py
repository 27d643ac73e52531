"""Keyword arguments of the functions that start jobs, derived from the declarations of the flags.

For static checkers, docs/site/reference.py writes the same keywords to `elastic.launcher.option_types`.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field
from typing import Any, TypeVar

from elastic.driver.commandline.options import flags
from elastic.errors import Invalid

Function = TypeVar("Function", bound=Callable[..., Any])


def keywords(function: str) -> dict[str, Field[Any]]:
    """Return the options that a function accepts, keyed by keyword argument, in the order of ``--help-all``."""
    known = [(use.keyword or option.name, option, use) for option, use in flags.declared()]
    return {name: option for name, option, use in known if function in use.functions}


def type_of(option: Field[Any]) -> str:
    """Return the type annotation of an option's keyword argument."""
    return option.metadata["use"].typed or str(option.type)


def flag_of(option: Field[Any]) -> str:
    """Return the first long spelling of the option's flag."""
    names: list[str] = option.metadata["flags"][0][0][0].split()
    return next(name for name in names if name.startswith("--"))


def accepts(function: str) -> Callable[[Function], Function]:
    """Return a decorator that shows the accepted keyword arguments in a function's signature.

    The shown signature has these arguments instead of ``**options``, for ``help()`` and editors.
    """

    def shown(given: Function) -> Function:
        signature = inspect.signature(given)
        shown = [
            each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD
        ]
        for name, option in keywords(function).items():
            parameter = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default
            )
            shown.append(parameter.replace(annotation=type_of(option)))
        given.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return given

    return shown


def words_of(function: str, given: Mapping[str, Any]) -> list[str]:
    """Convert keyword arguments of a function to command-line words.

    A value of None or False means that the option was not passed.

    Raises:
        TypeError: the function has no such argument.
        Invalid: the flag does not accept the value.
    """
    known = keywords(function)
    words: list[str] = []
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise TypeError(f"{function} has no keyword argument {name!r}; {hint}")
        flag = flag_of(known[name])
        _, metavar, convert, _ = known[name].metadata["flags"][0][0]
        if value is None or (metavar is None and not value):
            continue
        if metavar is None:
            words.append(flag)
        elif isinstance(metavar, tuple):
            words += [flag, *_range(name, value, convert)]
        else:
            words.append(f"{flag}={_text(name, value, value, convert)}")
    return words


def _text(name: str, given: Any, value: Any, convert: Callable[[str], Any]) -> str:
    try:
        convert(str(value))
    except argparse.ArgumentTypeError as error:
        raise Invalid(f"{name} is {given!r}: {error}") from None
    return str(value)


def _range(name: str, given: Any, convert: Callable[[str], Any]) -> list[str]:
    pair = list(given) if isinstance(given, Collection) and not isinstance(given, str) else []
    words = [_text(name, given, value, convert) for value in pair]
    if len(words) != 2 or convert(words[0]) > convert(words[1]):
        raise Invalid(
            f"{name} is {given!r}: pass the minimum and the maximum in seconds, as in (1, 60)"
        )
    return words
