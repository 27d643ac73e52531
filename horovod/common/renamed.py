"""Handle arguments that Horovod has renamed."""

from __future__ import annotations

import warnings
from typing import Any

from elastic.errors import Invalid


def renamed(what: str, new: str, value: Any, old: str, old_value: Any, default: Any = None) -> Any:
    """Return the value of an argument that was renamed, and warn if it has the old name.

    Args:
        what: name of the function.
        default: value of an argument that was not passed.

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
