"""Handling of arguments that Horovod has renamed."""

from __future__ import annotations

import warnings
from typing import Any

from elastic.errors import Invalid


def renamed(what: str, new: str, value: Any, old: str, old_value: Any, default: Any = None) -> Any:
    """Return the value of a renamed argument, and warn if it was passed under the old name.

    Args:
        what: name of the function.
        default: value that indicates that an argument was not passed.

    Raises:
        Invalid: (a ValueError) both names are given.
    """
    if old_value is None:
        return value
    if value != default:
        raise Invalid(
            f"{old} and {new} were both passed, but {old} is the old name of {new}: pass only {new}"
        )
    warnings.warn(f"{what}({old}=...) is deprecated; use {new}", DeprecationWarning, stacklevel=3)
    return old_value
